"""What `plan` makes and `run` reads: a batch's lengths and places with the static facts of its layers, as pytrees."""

import dataclasses
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from jattn.arguments import array, in_words
from jattn.attention.metadata import QueriesOverPages
from jattn.attention.paged_call import PagedCall, attend_pages
from jattn.pytree import pytree, static
from jattn.surfaces.flashinfer.cache import PagedCache, pages_of, words_of_cache
from jattn_kernels import ragged_extend
from jattn_kernels.spec import AttentionSpec


@pytree(kw_only=True)
class Plan:
    """What all plans have.

    Attributes:
        alibi_slopes: Of each query head.
        spec: Static facts of the layers.
        num_tokens: Rows of the queries that the plan is for.
        q_dtype, kv_dtype: Names.
        implementation: Which kernels to use; None lets dispatch choose.
    """

    alibi_slopes: Float[Array, " N"] | None = None
    spec: AttentionSpec = static()
    num_tokens: int = static()
    q_dtype: str = static()
    kv_dtype: str = static()
    implementation: str | None = static(default=None)

    def with_facts(self, spec: AttentionSpec, alibi_slopes: Float[Array, " N"] | None) -> "Plan":
        """The plan of the same batch for other layers."""
        return dataclasses.replace(self, spec=spec, alibi_slopes=alibi_slopes)

    def checked_queries(self, q: Any, spec: AttentionSpec) -> Float[Array, "T N H"]:
        """The queries that the plan is for.

        Raises:
            ValueError: They are others.
        """
        q = array("q", q)
        if q.shape != (self.num_tokens, spec.num_q_heads, spec.head_dim) or q.dtype.name != self.q_dtype:
            raise ValueError(
                f"`q` must have the planned {self.num_tokens} rows of {self.q_dtype}, {spec.num_q_heads} heads of "
                f"{spec.head_dim}. Got q.shape={q.shape}, q.dtype={q.dtype}."
            )
        return q


@pytree(kw_only=True)
class PagedPlan(Plan, QueriesOverPages):
    """A batch over paged keys and values, for every layer of one kind. Give it to compiled steps as an argument.

    Attributes:
        schedule: The kernels' work list; None where they need none.
        page_size: Tokens a page.
        Others: As in QueriesOverPages and Plan.
    """

    schedule: Any = None
    page_size: int = static()

    def scheduled(self) -> "PagedPlan":
        """The plan with its schedule; jit-able."""
        call = PagedCall(
            spec=self.spec,
            dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            features=() if self.alibi_slopes is None else ("alibi_slopes",),
            implementation=self.implementation,
        )
        return dataclasses.replace(self, schedule=call.schedule(self, self.num_tokens))

    def attend(
        self,
        q: Float[Array, "T N H"],
        paged_kv_cache: PagedCache,
        *,
        spec: AttentionSpec | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
        """Output and natural-log lse of the batch's queries.

        Args:
            paged_kv_cache: Keys and values, or both in one array whose axis after the pages' has the two.
            spec: Of a layer that differs from the planned one; the work list serves it if it has the same work.
            options: Scales and `layer_index`, as the kernels take them.

        Raises:
            ValueError: The queries or the cache are not what was planned for.
        """
        spec = self.spec if spec is None else spec
        k_pages, v_pages = pages_of(paged_kv_cache)
        combined = v_pages is None
        q = self.checked_queries(q, spec)
        self._check(k_pages, combined, spec)
        with in_words(**words_of_cache(v_pages)):
            return attend_pages(
                q,
                k_pages,
                v_pages,
                self,
                spec=dataclasses.replace(spec, combined_pool="pages_first") if combined else spec,
                schedule=self.schedule if self._has_work_of(spec) else None,
                alibi_slopes=self.alibi_slopes,
                implementation=self.implementation,
                return_lse=True,
                **options,
            )

    def with_facts(self, spec: AttentionSpec, alibi_slopes: Float[Array, " N"] | None) -> "PagedPlan":
        """The plan of the same batch for other layers; its work list stays if it serves them."""
        stays = self._has_work_of(spec) and (alibi_slopes is None) == (self.alibi_slopes is None)
        schedule = self.schedule if stays else None
        return dataclasses.replace(self, spec=spec, alibi_slopes=alibi_slopes, schedule=schedule)

    def _has_work_of(self, spec: AttentionSpec) -> bool:
        return spec == dataclasses.replace(
            self.spec, sm_scale=spec.sm_scale, logits_soft_cap=spec.logits_soft_cap, page_layout=spec.page_layout
        )

    def _check(self, k_pages, combined: bool, spec: AttentionSpec) -> None:
        if combined and spec.value_dim != spec.head_dim:
            raise ValueError(
                "`paged_kv_cache` must be a pair of arrays where a value head is not as wide as a key head. "
                f"Got one array, widths {spec.head_dim} and {spec.value_dim}."
            )
        if k_pages.dtype.name != self.kv_dtype:
            raise ValueError(
                f"`paged_kv_cache` must be of the planned dtype {self.kv_dtype}. Got dtype={k_pages.dtype}."
            )
        page_axis = -3 if spec.page_layout == "NHD" else -2
        if k_pages.ndim < 4 or k_pages.shape[page_axis] != self.page_size:
            raise ValueError(
                f"`paged_kv_cache` must have pages of the planned {self.page_size} tokens in layout "
                f"{spec.page_layout}. Got a shape of {k_pages.shape}."
            )


@pytree(kw_only=True)
class RaggedPlan(Plan):
    """A batch over keys and values that are not paged.

    Attributes:
        cu_q_lens, cu_kv_lens: Where each sequence's queries and keys begin.
        custom_mask: Which keys the queries see, in place of the causal rule.
        Others: As in Plan.
    """

    cu_q_lens: Int[Array, " B_plus_1"]
    cu_kv_lens: Int[Array, " B_plus_1"]
    custom_mask: Bool[Array, " M"] | None = None

    def attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "S K H"],
        v: Float[Array, "S K Hv"],
        *,
        spec: AttentionSpec | None = None,
        **scales: Any,
    ) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
        """Output and natural-log lse of the batch's queries; see `PagedPlan.attend`."""
        spec = self.spec if spec is None else spec
        q = self.checked_queries(q, spec)
        if k.dtype.name != self.kv_dtype:
            raise ValueError(f"`k` must be of the planned dtype {self.kv_dtype}. Got k.dtype={k.dtype}.")
        out, lse = ragged_extend(
            q,
            k,
            v,
            self.cu_q_lens,
            self.cu_kv_lens,
            spec=spec,
            custom_mask=self.custom_mask,
            alibi_slopes=self.alibi_slopes,
            implementation=self.implementation,
            return_lse=True,
            **scales,
        )
        return out, lse
