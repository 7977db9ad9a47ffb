"""FlashInfer's decode wrappers: `plan` on the host once a batch, `run` for each layer, in jit or not."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int

from jattn.surfaces.flashinfer.buffers import paged_bounds
from jattn.surfaces.flashinfer.cache import PagedCache
from jattn.surfaces.flashinfer.page_lists import checked_page_lists
from jattn.surfaces.flashinfer.plan import PagedPlan
from jattn.surfaces.flashinfer.wrapper import AttentionResult, PagedWrapper


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
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
        facts = self._facts(locals())
        lists = checked_page_lists(indptr, indices, last_page_len, page_size, bounds=self._bounds)
        return self._keep_lists(lists, page_size=page_size, q_len=1, num_tokens=len(lists.seq_lens), **facts)

    begin_forward = plan

    def forward(
        self,
        q: Float[Array, "T N H"],
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str = "NONE",
        q_scale: Any = None,
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
        """Deprecated: as `run`, but for a layer of these facts, their defaults too, whatever the plan says of them.

        Raises:
            ValueError: As in `plan` and `run`.
        """
        return self._run(locals())

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with `use_cuda_graph`, which see; its own names and order of arguments.

    Args:
        workspace_buffer, use_tensor_cores: Accepted and not used.
        indptr_buffer, indices_buffer, last_page_len_buffer: Only their shapes count: [max_batch_size + 1],
            [max_num_pages], [max_batch_size].
    """

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
        super().__init__(workspace_buffer, kv_layout, implementation=implementation)
        self._bounds = paged_bounds(
            indptr_buffer=indptr_buffer, indices_buffer=indices_buffer, last_page_len_buffer=last_page_len_buffer
        )
