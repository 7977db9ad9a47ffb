"""FlashInfer's prefill wrappers, over paged and over ragged keys: `plan` on the host, `run` for each layer."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jattn.surfaces.flashinfer.buffers import Bounds, buffer_size, paged_bounds
from jattn.surfaces.flashinfer.cache import PagedCache
from jattn.surfaces.flashinfer.masks import mask_on_host
from jattn.surfaces.flashinfer.page_lists import checked_indptr, checked_page_lists, padded
from jattn.surfaces.flashinfer.plan import PagedPlan, RaggedPlan
from jattn.surfaces.flashinfer.wrapper import AttentionResult, PagedWrapper, RaggedWrapper, Wrapper


class _RaggedQueries(Wrapper):
    """A wrapper whose sequences have as many queries each as `plan` says."""

    def _queries_and_facts(self, given: dict[str, Any], batch_size: int, kv_lens: np.ndarray) -> dict[str, Any]:
        """What `plan` says of queries, and the static facts; CUDA graphs have the query rows of the first plan.

        Args:
            kv_lens: Keys of each sequence, and of the padding that the bounds add to `batch_size`.

        Raises:
            ValueError: There are not `batch_size` sequences, or more rows than in the first plan.
        """
        rows = checked_indptr("qo_indptr", given["qo_indptr"])
        if len(rows) != batch_size + 1:
            raise ValueError(
                f"`qo_indptr` must have an entry more than there are sequences: {batch_size + 1}. Got {len(rows)}."
            )
        rows = padded(rows, len(kv_lens) + 1, rows[-1])
        first = self._planned if self.is_cuda_graph_enabled else None
        if first is not None and rows[-1] > first.num_tokens:
            raise ValueError(
                "With CUDA graphs the first plan has the most query rows: "
                f"`qo_indptr` must end at {first.num_tokens} at most. Got qo_indptr[-1]={rows[-1]}."
            )
        most = None if self._bounds is None else self._bounds.mask_bits
        mask = mask_on_host(given["custom_mask"], given["packed_custom_mask"], np.diff(rows), kv_lens, most=most)
        return self._facts(given) | {
            "cu_q_lens": jnp.asarray(rows),
            "custom_mask": None if mask is None else jnp.asarray(mask),
            "num_tokens": int(rows[-1]) if first is None else first.num_tokens,
        }


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper, _RaggedQueries):
    """Attention of ragged queries, the last ones of their sequences, over paged keys and values.

    Args:
        float_workspace_buffer: Accepted and not used: XLA plans the memory.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: Every plan then has the shapes that the buffers give and as many query rows as the first plan
            has, so that what was compiled for one serves all; rows past a smaller batch's are padding.
        qo_indptr_buf, paged_kv_indptr_buf: Only their shapes count, as of all buffers: [batch_size + 1].
        paged_kv_indices_buf, paged_kv_last_page_len_buf: [max_num_pages] and [batch_size].
        custom_mask_buf: [bytes of the largest packed mask]; if given, every plan must have a mask.
        mask_indptr_buf, backend: Accepted and not used: offsets follow from the lengths, and dispatch chooses.
        implementation: Which kernels to use; None lets dispatch choose.

    Raises:
        ValueError: `kv_layout` is unknown, or buffers are missing or do not belong together.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        *,
        implementation: str | None = None,
    ):
        super().__init__(kv_layout, implementation)
        if use_cuda_graph:
            bounds = paged_bounds(
                paged_kv_indptr_buf=paged_kv_indptr_buf,
                paged_kv_indices_buf=paged_kv_indices_buf,
                paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            )
            self._bounds = bounds.with_queries(qo_indptr_buf, custom_mask_buf)

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
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
        non_blocking: bool = False,
    ) -> PagedPlan:
        """Plans a batch: the wrapper keeps the plan for calls of `run` outside jit, and returns it for those inside.

        Args:
            qo_indptr: Where each sequence's queries begin, [batch_size + 1].
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: The page lists, [batch_size + 1],
                [paged_kv_indptr[-1]] and [batch_size], the queries' own keys included.
            head_dim_vo: Width of a value head; `head_dim_qk` if None.
            custom_mask: Bools, each sequence's [q_len, kv_len] row-major; replaces the causal rule.
            packed_custom_mask: The same in bits, as `segment_packbits` packs them; taken in place of `custom_mask`.
            causal: Whether a query sees no key after its own.
            use_fp16_qk_reduction: Accepted and not used: sums are float32.
            Others: As in `BatchDecodeWithPagedKVCacheWrapper.plan`.

        Raises:
            ValueError: An argument contradicts its rule or another one, is traced, or does not fit the buffers; the
                kept plan is then still the one before.
        """
        given, pages = locals(), (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        lists = checked_page_lists(*pages, page_size, prefix="paged_kv_", bounds=self._bounds)
        facts = self._queries_and_facts(given, len(paged_kv_last_page_len), lists.seq_lens)
        return self._keep_lists(lists, page_size=page_size, **facts)

    begin_forward = plan

    def forward(
        self,
        q: Float[Array, "T N H"],
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Any = None,
        v_scale: Any = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
        layer_index: Int[Array, ""] | int | None = None,
        planned: PagedPlan | None = None,
    ) -> AttentionResult:
        """As the decode wrapper's; a mask of the plan stays, and still replaces the causal rule.

        Raises:
            ValueError: As in `plan` and `run`.
        """
        return self._run(locals())

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(RaggedWrapper, _RaggedQueries):
    """Attention of ragged queries, the last ones of their sequences, over keys and values that are not paged.

    Args:
        float_workspace_buffer, mask_indptr_buf, backend: Accepted and not used, as in
            `BatchPrefillWithPagedKVCacheWrapper`.
        kv_layout: "NHD", [S, K, H], or "HND", [K, S, H].
        use_cuda_graph: As there. Keys past the last sequence's are padding.
        qo_indptr_buf, kv_indptr_buf: Only their shapes count, [batch_size + 1].
        custom_mask_buf, implementation: As there.

    Raises:
        ValueError: `kv_layout` is unknown, or buffers are missing or do not belong together.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        *,
        implementation: str | None = None,
    ):
        super().__init__(kv_layout, implementation)
        if use_cuda_graph:
            bounds = Bounds(buffer_size("kv_indptr_buf", kv_indptr_buf) - 1)
            self._bounds = bounds.with_queries(qo_indptr_buf, custom_mask_buf)

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        non_blocking: bool = False,
    ) -> RaggedPlan:
        """Plans a batch, as `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Args:
            qo_indptr, kv_indptr: Where each sequence's queries and keys begin, [batch_size + 1].
            Others: As there.

        Raises:
            ValueError: As there.
        """
        given, keys = locals(), checked_indptr("kv_indptr", kv_indptr)
        batch_size = len(keys) - 1
        if self._bounds is not None:
            if batch_size > self._bounds.batch_size:
                raise ValueError(
                    f"The plan must fit the buffers' {self._bounds.batch_size} sequences. Got {batch_size}."
                )
            keys = padded(keys, self._bounds.batch_size + 1, keys[-1])
        facts = self._queries_and_facts(given, batch_size, np.diff(keys))
        return self._kept(RaggedPlan(cu_kv_lens=jnp.asarray(keys), **facts), int(keys[-1]))

    begin_forward = plan

    def forward(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "..."],
        v: Float[Array, "..."],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
        planned: RaggedPlan | None = None,
    ) -> AttentionResult:
        """As `BatchPrefillWithPagedKVCacheWrapper.forward`."""
        return self._run(locals())

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
