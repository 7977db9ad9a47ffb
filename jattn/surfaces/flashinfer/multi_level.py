"""FlashInfer's cascade: attention over levels of keys that more or fewer sequences share, merged."""

import copy
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.arguments import in_words, shown, whole
from jattn.surfaces.flashinfer.cache import PagedCache
from jattn.surfaces.flashinfer.page_lists import checked_indptr
from jattn.surfaces.flashinfer.plan import PagedPlan
from jattn.surfaces.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from jattn_kernels import lse_from_base2, merge_states

# What `plan` says of all levels alike.
_FACTS = (
    *("num_qo_heads", "num_kv_heads", "page_size", "pos_encoding_mode", "sm_scale", "window_left", "logits_soft_cap"),
    *("rope_scale", "rope_theta", "q_data_type", "kv_data_type"),
)


class MultiLevelCascadeAttentionWrapper:
    """Attention over the keys of several levels, all in one paged cache: from what all share to what is one's own.

    Positions count within a level, as in FlashInfer: a window, RoPE and ALiBi are each level's own.

    Args:
        num_levels: How many there are.
        float_workspace_buffer: Accepted and not used: XLA plans the memory.
        kv_layout: "NHD" or "HND".
        use_cuda_graph, the others: Of each level, as `BatchPrefillWithPagedKVCacheWrapper` has them.
        implementation: Which kernels to use; None lets dispatch choose.

    Raises:
        ValueError: A list has not one entry a level, or as in `BatchPrefillWithPagedKVCacheWrapper`.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[Any] | None = None,
        paged_kv_indptr_buf_arr: Sequence[Any] | None = None,
        paged_kv_indices_buf_arr: Sequence[Any] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[Any] | None = None,
        *,
        implementation: str | None = None,
    ):
        self._num_levels = whole("num_levels", num_levels)
        self._use_cuda_graph = use_cuda_graph
        buffers = [{} for _ in range(self._num_levels)]
        if use_cuda_graph:
            lists = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
            buffers = self._by_level(locals(), *(f"{name}_buf_arr" for name in lists))
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, implementation=implementation, **of_level
            )
            for of_level in buffers
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether all plans share one shape."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffers: Any) -> None:
        """Accepted, and does nothing: there is no workspace."""

    @in_words(head_dim_qk="head_dim")
    def plan(
        self,
        qo_indptr_arr: Sequence[Any],
        paged_kv_indptr_arr: Sequence[Any],
        paged_kv_indices_arr: Sequence[Any],
        paged_kv_last_page_len: Sequence[Any],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> tuple[PagedPlan, ...]:
        """Plans a batch: the wrapper keeps the plans for calls of `run` outside jit, and returns them for those inside.

        Args:
            qo_indptr_arr: Of each level, where the queries begin that share keys; each ends at all queries.
            paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: Of each level, the page lists.
            causal: Of the last level; the others' keys all come before the queries.
            Others: As in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises:
            ValueError: A list has not one entry a level, the levels end at different queries, or as there; the
                kept plans are then still those before.
        """
        given = locals()
        facts: dict[str, Any] = {name: given[name] for name in _FACTS} | {"head_dim_qk": head_dim}
        lists = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
        levels = self._by_level(given, *lists)
        ends = [int(checked_indptr("qo_indptr_arr", level["qo_indptr"])[-1]) for level in levels]
        if len(set(ends)) > 1:
            raise ValueError(f"`qo_indptr_arr` must end at as many queries in each level. Got {ends}.")
        before = list(self._wrappers)
        self._wrappers = [copy.copy(wrapper) for wrapper in before]
        try:
            return tuple(
                wrapper.plan(**facts | level, causal=causal and wrapper is self._wrappers[-1])
                for wrapper, level in zip(self._wrappers, levels, strict=True)
            )
        except BaseException:
            self._wrappers = before  # a level that was planned must not meet one that was not
            raise

    begin_forward = plan

    def run(
        self,
        q: Float[Array, "T N H"],
        paged_kv_cache: PagedCache,
        *,
        layer_index: Int[Array, ""] | int | None = None,
        planned: tuple[PagedPlan, ...] | None = None,
    ) -> Float[Array, "T N H"]:
        """Attention of the planned batch over the keys of all levels.

        Args:
            planned: What `plan` returned; the last plans if None, outside jit only.
            Others: As in `PagedWrapper.run`.

        Raises:
            ValueError: There is no plan, or the arrays are not what it is for.
        """
        if planned is not None and (not isinstance(planned, tuple) or len(planned) != self._num_levels):
            raise ValueError(
                f"`planned` must be the {self._num_levels} plans that this wrapper's `plan` returned. "
                f"Got {shown('planned', planned)}."
            )
        plans = (None,) * self._num_levels if planned is None else planned
        outs, lses = zip(
            *(
                wrapper.run(q, paged_kv_cache, return_lse=True, layer_index=layer_index, planned=plan)
                for wrapper, plan in zip(self._wrappers, plans, strict=True)
            ),
            strict=True,
        )
        return merge_states(jnp.stack(outs), lse_from_base2(jnp.stack(lses)))[0]

    forward = run

    def _by_level(self, given: dict[str, Any], *names: str) -> list[dict[str, Any]]:
        """What each level has of the lists of these names, by that without "_arr"."""
        for name in names:
            if not isinstance(given[name], list | tuple) or len(given[name]) != self._num_levels:
                rule = f"`{name}` must be a list of one array for each of the {self._num_levels} levels."
                raise ValueError(f"{rule} Got {shown(name, given[name])}.")
        return [{name.removesuffix("_arr"): given[name][i] for name in names} for i in range(self._num_levels)]
