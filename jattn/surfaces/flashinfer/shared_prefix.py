"""FlashInfer's two deprecated wrappers over a prefix that is not paged and that all sequences share."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from jattn.arguments import in_words
from jattn.surfaces.flashinfer.cache import PagedCache
from jattn.surfaces.flashinfer.cascade import merge_state
from jattn.surfaces.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from jattn.surfaces.flashinfer.plan import PagedPlan
from jattn.surfaces.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from jattn.surfaces.flashinfer.single import single_prefill_with_kv_cache
from jattn.surfaces.flashinfer.wrapper import PagedWrapper, WithoutWorkspace


class _SharedPrefixWrapper[W: PagedWrapper](WithoutWorkspace):
    """Attention over a shared prefix, and by a wrapper `W` over each sequence's own paged keys.

    Args:
        float_workspace_buffer: Accepted and not used: XLA plans the memory.
        kv_layout: "NHD" or "HND", of the prefix and of the pages.
    """

    _own: Callable[[Any, str], W]

    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD"):
        self._wrapper = type(self)._own(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def _with_prefix(self, q: Any, k_shared: Any, v_shared: Any, own: Any, **facts: Any) -> Float[Array, "T N H"]:
        facts |= {"kv_layout": self._kv_layout, "return_lse": True}
        return merge_state(*single_prefill_with_kv_cache(q, k_shared, v_shared, **facts), *own)[0]


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper[BatchDecodeWithPagedKVCacheWrapper]):
    """Decode attention over a shared prefix and each sequence's own paged keys.

    Args:
        float_workspace_buffer: Accepted and not used: XLA plans the memory.
        kv_layout: "NHD" or "HND", of the prefix and of the pages.
    """

    _own = BatchDecodeWithPagedKVCacheWrapper

    @in_words(
        indptr="unique_kv_indptr",
        indices="unique_kv_indices",
        last_page_len="unique_kv_last_page_len",
    )
    def begin_forward(
        self,
        unique_kv_indptr: Any,
        unique_kv_indices: Any,
        unique_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Any = "float16",
    ) -> PagedPlan:
        """As `BatchDecodeWithPagedKVCacheWrapper.plan` of the sequences' own keys."""
        lists = unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len
        return self._wrapper.plan(*lists, num_qo_heads, num_kv_heads, head_dim, page_size, data_type=data_type)

    @in_words(paged_kv_cache="unique_kv_cache", k="k_shared", v="v_shared")
    def forward(
        self,
        q: Float[Array, "T N H"],
        k_shared: Float[Array, "..."],
        v_shared: Float[Array, "..."],
        unique_kv_cache: PagedCache,
        *,
        planned: PagedPlan | None = None,
    ) -> Float[Array, "T N H"]:
        """Attention of the planned batch over the prefix, [S, K, H] if NHD, and its own keys.

        Raises:
            ValueError: There is no plan, or the arrays are not what it is for.
        """
        own = self._wrapper.forward_return_lse(q, unique_kv_cache, planned=planned)
        return self._with_prefix(q, k_shared, v_shared, own)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper[BatchPrefillWithPagedKVCacheWrapper]):
    """Attention of ragged queries over a shared prefix and each sequence's own paged keys.

    Args:
        Others: As in `BatchDecodeWithSharedPrefixPagedKVCacheWrapper`.
    """

    _own = BatchPrefillWithPagedKVCacheWrapper

    @in_words(head_dim_qk="head_dim")
    def begin_forward(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> PagedPlan:
        """As `BatchPrefillWithPagedKVCacheWrapper.plan` of the sequences' own keys."""
        lists = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        types = {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        return self._wrapper.plan(*lists, num_qo_heads, num_kv_heads, head_dim, page_size, **types)

    @in_words(paged_kv_cache="unique_kv_cache", k="k_shared", v="v_shared")
    def forward(
        self,
        q: Float[Array, "T N H"],
        k_shared: Float[Array, "..."],
        v_shared: Float[Array, "..."],
        unique_kv_cache: PagedCache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        planned: PagedPlan | None = None,
    ) -> Float[Array, "T N H"]:
        """Attention of the planned batch over the prefix, [S, K, H] if NHD, and its own keys.

        Args:
            causal: Of its own keys.
            use_fp16_qk_reduction, rope_scale, rope_theta: Accepted and not used: nothing is rotated.

        Raises:
            ValueError: There is no plan, or the arrays are not what it is for.
        """
        own = self._wrapper.forward_return_lse(q, unique_kv_cache, causal, sm_scale=sm_scale, planned=planned)
        return self._with_prefix(q, k_shared, v_shared, own, sm_scale=sm_scale)
