"""What `plan` makes and `run` reads: a batch's lengths and places with the static facts of its layers, as pytrees."""

import dataclasses
import functools
import typing
from typing import Any, Self

import jax
from jaxtyping import Array, Bool, Float, Int

from jattn.arguments import array, in_words
from jattn.attention.metadata import QueriesOverPages
from jattn.attention.paged_call import attend_pages, schedule_of_call
from jattn.surfaces.flashinfer.cache import PagedCache, pages_of, words_of_cache
from jattn_kernels import ragged_extend
from jattn_kernels.spec import AttentionSpec


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedPlan(QueriesOverPages):
    """A batch over paged keys and values, for every layer of one kind. Give it to compiled steps as an argument.

    Attributes:
        alibi_slopes: Of each query head.
        schedule: The kernels' work list; None where they need none.
        spec: Static facts of the layers.
        page_size: Tokens a page.
        num_tokens: Rows of the queries that the plan is for.
        q_dtype, kv_dtype: Names.
        implementation: Which kernels to use; None lets dispatch choose.
        Others: As in QueriesOverPages.
    """

    alibi_slopes: Float[Array, " N"] | None = None
    schedule: Any = None
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})
    q_dtype: str = dataclasses.field(metadata={"static": True})
    kv_dtype: str = dataclasses.field(metadata={"static": True})
    implementation: str | None = dataclasses.field(metadata={"static": True})

    def attend(
        self,
        q: Float[Array, "T N H"],
        paged_kv_cache: PagedCache,
        *,
        spec: AttentionSpec | None = None,
        layer_index: Int[Array, ""] | int | None = None,
        q_scale: Float[Array, "..."] | None = None,
        k_scale: Float[Array, "..."] | None = None,
        v_scale: Float[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
        """Output and natural-log lse of the batch's queries.

        Args:
            paged_kv_cache: Keys and values, or both in one array whose axis after the pages' has the two.
            spec: Of a layer that differs from the planned one; the work list serves it if it has the same work.
            layer_index: Which layer of a cache with a leading layer axis.

        Raises:
            ValueError: The queries or the cache are not what was planned for.
        """
        spec = self.spec if spec is None else spec
        k_pages, v_pages = pages_of(paged_kv_cache)
        combined = v_pages is None
        q = checked_queries(q, self.num_tokens, self.q_dtype, spec)
        self._check(k_pages, combined, spec)
        with in_words(**words_of_cache(v_pages)):
            return attend_pages(
                q,
                k_pages,
                v_pages,
                self,
                spec=dataclasses.replace(spec, combined_pool="pages_first") if combined else spec,
                schedule=self.schedule if self._has_work_of(spec) else None,
                layer_index=layer_index,
                q_scale=q_scale,
                k_scale=k_scale,
                v_scale=v_scale,
                alibi_slopes=self.alibi_slopes,
                implementation=self.implementation,
                return_lse=True,
            )

    def with_facts(self, spec: AttentionSpec, slopes: Float[Array, " N"] | None) -> Self:
        """The plan of the same batch for other layers; its work list stays if it serves them."""
        stays = self._has_work_of(spec) and (slopes is None) == (self.alibi_slopes is None)
        return dataclasses.replace(self, spec=spec, alibi_slopes=slopes, schedule=self.schedule if stays else None)

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


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedPlan:
    """A batch over keys and values that are not paged; see PagedPlan for what they share.

    Attributes:
        cu_q_lens, cu_kv_lens: Where each sequence's queries and keys begin.
    """

    cu_q_lens: Int[Array, " B_plus_1"]
    cu_kv_lens: Int[Array, " B_plus_1"]
    custom_mask: Bool[Array, " M"] | None
    alibi_slopes: Float[Array, " N"] | None
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})
    q_dtype: str = dataclasses.field(metadata={"static": True})
    kv_dtype: str = dataclasses.field(metadata={"static": True})
    implementation: str | None = dataclasses.field(metadata={"static": True})

    def attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "S K H"],
        v: Float[Array, "S K Hv"],
        *,
        spec: AttentionSpec | None = None,
        q_scale: Float[Array, "..."] | None = None,
        k_scale: Float[Array, "..."] | None = None,
        v_scale: Float[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
        """Output and natural-log lse of the batch's queries.

        Raises:
            ValueError: The queries or the keys are not what was planned for.
        """
        spec = self.spec if spec is None else spec
        q = checked_queries(q, self.num_tokens, self.q_dtype, spec)
        k, v = array("k", k, "S", "K", "H"), array("v", v, "S", "K", "H")
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
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            alibi_slopes=self.alibi_slopes,
            implementation=self.implementation,
            return_lse=True,
        )
        return out, lse

    def with_facts(self, spec: AttentionSpec, slopes: Float[Array, " N"] | None) -> Self:
        """The plan of the same batch for other layers."""
        return dataclasses.replace(self, spec=spec, alibi_slopes=slopes)


def checked_queries(q: Any, num_tokens: int, q_dtype: str, spec: AttentionSpec) -> Float[Array, "T N H"]:
    """The queries that a plan is for.

    Raises:
        ValueError: They are others.
    """
    q = array("q", q)
    expected = (num_tokens, spec.num_q_heads, spec.head_dim)
    if q.shape != expected or q.dtype.name != q_dtype:
        raise ValueError(
            f"`q` must have the planned {num_tokens} rows of {q_dtype}, {spec.num_q_heads} heads of {spec.head_dim}. "
            f"Got q.shape={q.shape}, q.dtype={q.dtype}."
        )
    return q


def paged_plan(read: QueriesOverPages, alibi_slopes: Float[Array, " N"] | None = None, **facts: Any) -> PagedPlan:
    """A plan with its schedule; jit-able.

    Args:
        facts: The static fields of the plan.
    """
    plan = PagedPlan(
        **{field.name: getattr(read, field.name) for field in dataclasses.fields(read)},
        alibi_slopes=alibi_slopes,
        **facts,
    )
    schedule = schedule_of_call(
        plan,
        spec=plan.spec,
        num_tokens=plan.num_tokens,
        dtype=plan.q_dtype,
        kv_dtype=plan.kv_dtype,
        page_size=plan.page_size,
        features=() if alibi_slopes is None else ("alibi_slopes",),
        implementation=plan.implementation,
    )
    return dataclasses.replace(plan, schedule=schedule)
