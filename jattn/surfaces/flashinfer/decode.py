"""FlashInfer's decode wrappers: `plan` on the host once a batch, `run` for each layer, in jit or not."""

from typing import Any

from jattn.arguments import in_words
from jattn.surfaces.flashinfer.forward import DecodeForward
from jattn.surfaces.flashinfer.layer_facts import alibi_slopes, attention_spec, data_types
from jattn.surfaces.flashinfer.page_lists import checked_page_lists
from jattn.surfaces.flashinfer.plan import PagedPlan
from jattn.surfaces.flashinfer.planning import paged_bounds, plan_of_lists


class BatchDecodeWithPagedKVCacheWrapper(DecodeForward):
    """Decode attention of a batch over paged keys and values, one query a sequence.

    Args:
        float_workspace_buffer: Accepted and not used: XLA plans the memory.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: Every plan then has the shapes that the three buffers give, so that what was compiled for one
            serves all; a smaller batch has padded rows, in `q` and in what `run` returns too.
        use_tensor_cores: Accepted and not used: the kernels choose.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: Only their shapes count, which
            arrays or `jax.ShapeDtypeStruct` have: [batch_size + 1], [max_num_pages], [batch_size].
        implementation: Which kernels to use; None lets dispatch choose.

    Raises:
        ValueError: `kv_layout` is unknown, or buffers are missing or do not belong together.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        *,
        implementation: str | None = None,
    ):
        super().__init__(kv_layout, implementation)
        if use_cuda_graph:
            self._bounds = paged_bounds(
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = False,
    ) -> PagedPlan:
        """Plans a batch: the wrapper keeps the plan for calls of `run` outside jit, and returns it for those inside.

        Args:
            indptr, indices, last_page_len: The page lists, [batch_size + 1], [indptr[-1]] and [batch_size]; read on
                the host. A sequence without pages has no keys.
            pos_encoding_mode: NONE, ROPE_LLAMA (queries and keys arrive unrotated) or ALIBI.
            window_left: Keys to the left, own one not counted; -1 is off.
            logits_soft_cap: 0 or None is off.
            q_data_type: Dtype of the queries.
            kv_data_type: Dtype of the cache; that of the queries if None.
            data_type: Deprecated: dtype of both. Queries keep theirs if it is fp8.
            sm_scale: 1 / sqrt(head_dim) if None.
            rope_scale, rope_theta: 1 and 1e4 if None.
            non_blocking: Accepted and not used: JAX orders copies and what reads them.

        Raises:
            ValueError: An argument contradicts its rule or another one, is traced, or does not fit the buffers; the
                kept plan is then still the one before.
        """
        lists = checked_page_lists(indptr, indices, last_page_len, page_size, bounds=self._bounds)
        spec = attention_spec(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_layout=self._kv_layout,
            causal=True,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        q_dtype, kv_dtype = data_types(q_data_type, kv_data_type, data_type)
        planned = plan_of_lists(
            lists,
            None,
            self._bounds,
            spec=spec,
            page_size=page_size,
            num_tokens=len(lists.seq_lens),
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            alibi_slopes=alibi_slopes(pos_encoding_mode, spec.num_q_heads),
            implementation=self._implementation,
        )
        return self._kept(planned, lists.num_pages)

    begin_forward = plan


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with `use_cuda_graph`, which see; its own names and order of arguments.

    Args:
        workspace_buffer, use_tensor_cores: Accepted and not used.
        indptr_buffer, indices_buffer, last_page_len_buffer: Only their shapes count: [max_batch_size + 1],
            [max_num_pages], [max_batch_size].
    """

    @in_words(**{f"paged_kv_{name}": name for name in ("indptr_buffer", "indices_buffer", "last_page_len_buffer")})
    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: Any,
        indices_buffer: Any,
        last_page_len_buffer: Any,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
        *,
        implementation: str | None = None,
    ):
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
            implementation=implementation,
        )
