"""FlashInfer's prefill wrappers, over paged and over ragged keys: `plan` on the host, `run` for each layer."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.arguments import in_words
from jattn.surfaces.flashinfer.forward import PagedPrefillForward, RaggedForward
from jattn.surfaces.flashinfer.layer_facts import alibi_slopes, attention_spec, data_types
from jattn.surfaces.flashinfer.masks import mask_on_host
from jattn.surfaces.flashinfer.page_lists import Bounds, checked_indptr, checked_page_lists, padded
from jattn.surfaces.flashinfer.plan import PagedPlan, RaggedPlan
from jattn.surfaces.flashinfer.planning import buffer_size, paged_bounds, plan_of_lists


class BatchPrefillWithPagedKVCacheWrapper(PagedPrefillForward):
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
        self._mask_bits: int | None = None
        if use_cuda_graph:
            self._bounds = paged_bounds(
                paged_kv_indptr_buf=paged_kv_indptr_buf,
                paged_kv_indices_buf=paged_kv_indices_buf,
                paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            )
            check_same_rows("qo_indptr_buf", qo_indptr_buf, self._bounds.batch_size)
            self._mask_bits = mask_bits(custom_mask_buf)

    @in_words(head_dim="head_dim_qk")
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
        lists = checked_page_lists(
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            page_size,
            prefix="paged_kv_",
            bounds=self._bounds,
        )
        rows = query_rows(qo_indptr, len(paged_kv_last_page_len), self._bounds)
        mask = mask_on_host(custom_mask, packed_custom_mask, np.diff(rows), lists.seq_lens, most=self._mask_bits)
        spec = attention_spec(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            head_dim_vo=head_dim_vo,
            kv_layout=self._kv_layout,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        q_dtype, kv_dtype = data_types(q_data_type, kv_data_type)
        planned = plan_of_lists(
            lists,
            jnp.asarray(rows),
            self._bounds,
            spec=spec,
            page_size=page_size,
            num_tokens=num_rows(rows, self._planned if self.is_cuda_graph_enabled else None),
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            custom_mask=None if mask is None else jnp.asarray(mask),
            alibi_slopes=alibi_slopes(pos_encoding_mode, spec.num_q_heads),
            implementation=self._implementation,
        )
        return self._kept(planned, lists.num_pages)

    begin_forward = plan


class BatchPrefillWithRaggedKVCacheWrapper(RaggedForward):
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
        self._mask_bits: int | None = None
        if use_cuda_graph:
            self._bounds = Bounds(buffer_size("kv_indptr_buf", kv_indptr_buf) - 1, 0)
            check_same_rows("qo_indptr_buf", qo_indptr_buf, self._bounds.batch_size)
            self._mask_bits = mask_bits(custom_mask_buf)

    @in_words(head_dim="head_dim_qk")
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
        keys = checked_indptr("kv_indptr", kv_indptr)
        batch_size = len(keys) - 1
        rows = query_rows(qo_indptr, batch_size, self._bounds)
        if self._bounds is not None:
            if batch_size > self._bounds.batch_size:
                raise ValueError(
                    f"The plan must fit the buffers' {self._bounds.batch_size} sequences. Got {batch_size}."
                )
            keys = padded(keys, self._bounds.batch_size + 1, keys[-1])
        mask = mask_on_host(custom_mask, packed_custom_mask, np.diff(rows), np.diff(keys), most=self._mask_bits)
        spec = attention_spec(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            head_dim_vo=head_dim_vo,
            kv_layout=self._kv_layout,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        q_dtype, kv_dtype = data_types(q_data_type, kv_data_type)
        planned = RaggedPlan(
            cu_q_lens=jnp.asarray(rows),
            cu_kv_lens=jnp.asarray(keys),
            custom_mask=None if mask is None else jnp.asarray(mask),
            alibi_slopes=alibi_slopes(pos_encoding_mode, spec.num_q_heads),
            spec=spec,
            num_tokens=num_rows(rows, self._planned if self.is_cuda_graph_enabled else None),
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            implementation=self._implementation,
        )
        return self._kept(planned, int(keys[-1]))

    begin_forward = plan


def query_rows(qo_indptr: Any, batch_size: int, bounds: Bounds | None) -> np.ndarray:
    """Where each sequence's queries begin, padded to `bounds` with sequences without any.

    Raises:
        ValueError: There are not `batch_size` sequences.
    """
    rows = checked_indptr("qo_indptr", qo_indptr)
    if len(rows) != batch_size + 1:
        raise ValueError(
            f"`qo_indptr` must have an entry more than there are sequences: {batch_size + 1}. Got {len(rows)}."
        )
    return rows if bounds is None or batch_size > bounds.batch_size else padded(rows, bounds.batch_size + 1, rows[-1])


def num_rows(rows: np.ndarray, first: Any) -> int:
    """Query rows of a plan: those of the batch, or those of the first plan if there is one to be like.

    Raises:
        ValueError: The batch has more.
    """
    if first is None:
        return int(rows[-1])
    if rows[-1] > first.num_tokens:
        raise ValueError(
            "With CUDA graphs the first plan has the most query rows: "
            f"`qo_indptr` must end at {first.num_tokens} at most. Got qo_indptr[-1]={rows[-1]}."
        )
    return first.num_tokens


def check_same_rows(name: str, buffer: Any, batch_size: int) -> None:
    """Checks that a buffer of offsets is for `batch_size` sequences.

    Raises:
        ValueError: It is not.
    """
    if buffer_size(name, buffer) != batch_size + 1:
        raise ValueError(
            f"`{name}` must be [batch_size + 1] as the other buffers are: {batch_size + 1}. Got {buffer.shape[0]}."
        )


def mask_bits(custom_mask_buf: Any) -> int | None:
    """Bits that the buffer of packed masks holds; None without one."""
    return None if custom_mask_buf is None else 8 * buffer_size("custom_mask_buf", custom_mask_buf)
