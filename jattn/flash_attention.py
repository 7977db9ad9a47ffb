"""FlashAttentionBackend: SGLang's backend surface over jattn's kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.backend import AttentionLayer
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import KVPool
from jattn.metadata import AttentionMetadata
from jattn.rotary import Angles
from jattn_kernels import make_schedule, paged_decode, paged_extend
from jattn_kernels.spec import AttentionSpec, PageLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionConfig:
    """What SGLang's backend reads from its model runner.

    Attributes:
        max_context_len: Longest sequence, in tokens; bounds the page tables made from `req_to_token`.
        page_size: Tokens a page.
        layers: One of each kind of layer that the model has: their work lists are made once a batch. A layer of
            another kind makes its own.
        dtype: Name of the dtype of queries, keys and values; the work lists depend on it.
        implementation: Which kernels to use; None lets dispatch choose.
    """

    max_context_len: int
    page_size: int
    layers: tuple[AttentionLayer, ...] = ()
    dtype: str = "float32"
    implementation: str | None = None

    def __post_init__(self):
        for name in ("max_context_len", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1. Got {name}={getattr(self, name)}.")


@dataclasses.dataclass(frozen=True)
class CudaGraphState:
    """The static sizes that captured steps are compiled for.

    Attributes:
        max_bs: Largest batch, in sequences.
        max_num_tokens: Largest batch, in tokens.
        max_pages: Width of a page table.
    """

    max_bs: int
    max_num_tokens: int
    max_pages: int


@dataclasses.dataclass(frozen=True)
class FlashAttentionBackend:
    """Static and hashable: arrays come in through calls, metadata and pool go out of them."""

    config: FlashAttentionConfig

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> AttentionMetadata:
        """Metadata of a batch, once for all layers; jit-able."""
        decode = forward_batch.forward_mode.is_decode_or_idle()
        num_tokens = forward_batch.input_ids.shape[0]
        return AttentionMetadata(
            seq_lens=forward_batch.seq_lens,
            cu_q_lens=forward_batch.cu_q_lens,
            page_tables=forward_batch.page_tables,
            slots=forward_batch.out_cache_loc,
            schedules=self._schedules(
                forward_batch.seq_lens, None if decode else forward_batch.cu_q_lens, 1 if decode else num_tokens
            ),
            max_seq_len_q=1 if decode else num_tokens,
            max_seq_len_k=self.config.max_context_len,
        )

    def forward_extend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K Hv"] | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        metadata: AttentionMetadata,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "T N Hv"], KVPool]:
        """Writes this pass's keys and values, then attends; many tokens a sequence. The pool may be donated."""
        pool = _saved(pool, layer, metadata, k, v) if save_kv_cache else pool
        group = pool.groups[layer.group]
        out = paged_extend(
            q,
            group.k,
            group.v,
            metadata.page_tables[layer.group],
            metadata.seq_lens,
            metadata.cu_q_lens,
            spec=spec_of(layer, group.page_layout),
            schedule=self._schedule(layer, metadata),
            layer_index=layer.layer_id,
            implementation=self.config.implementation,
        )
        assert isinstance(out, jax.Array)
        return out, pool

    def forward_decode(
        self,
        q: Float[Array, "B N H"],
        k: Float[Array, "B K H"] | None,
        v: Float[Array, "B K Hv"] | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        metadata: AttentionMetadata,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "B N Hv"], KVPool]:
        """Writes this pass's keys and values, then attends; one token a sequence. The pool may be donated."""
        pool = _saved(pool, layer, metadata, k, v) if save_kv_cache else pool
        group = pool.groups[layer.group]
        out = paged_decode(
            q[:, None],
            group.k,
            group.v,
            metadata.page_tables[layer.group],
            metadata.seq_lens,
            spec=spec_of(layer, group.page_layout),
            schedule=self._schedule(layer, metadata),
            layer_index=layer.layer_id,
            implementation=self.config.implementation,
        )
        assert isinstance(out, jax.Array)
        return out[:, 0], pool

    def save_rotated(
        self,
        qkv: Float[Array, "T heads H"],
        angles: Angles,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        pool: KVPool,
    ) -> tuple[Float[Array, "T N H"], KVPool]:
        """Turned queries, and the pool with this pass's turned keys and values. The pool may be donated."""
        slots = metadata.slots[layer.group]
        implementation = self.config.implementation
        return pool.rotate_and_write(layer.group, layer.layer_id, slots, qkv, angles, implementation=implementation)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length that fills a bucket's unused rows."""
        return 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> CudaGraphState:
        """The static sizes for steps of at most `max_bs` sequences and `max_num_tokens` tokens."""
        if max_bs < 1 or max_num_tokens < max_bs:
            raise ValueError(
                "`max_bs` must be at least 1 and `max_num_tokens` at least `max_bs`. "
                f"Got max_bs={max_bs}, max_num_tokens={max_num_tokens}."
            )
        return CudaGraphState(max_bs, max_num_tokens, -(-self.config.max_context_len // self.config.page_size))

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Int[Array, " B"],
        seq_lens: Int[Array, " B"],
        req_to_token: Int[Array, "R max_context_len"],
        forward_mode: ForwardMode = ForwardMode.DECODE,
    ) -> AttentionMetadata:
        """Example metadata to compile a decode step of `bs` rows with; the arguments' values do not matter."""
        if num_tokens != bs:
            raise ValueError(f"`num_tokens` must equal `bs` in decode. Got bs={bs}, num_tokens={num_tokens}.")
        return self.init_forward_metadata_replay_cuda_graph(
            bs, req_pool_indices, seq_lens, req_to_token, forward_mode=forward_mode
        )

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Int[Array, " B"],
        seq_lens: Int[Array, " B"],
        req_to_token: Int[Array, "R max_context_len"],
        forward_mode: ForwardMode = ForwardMode.DECODE,
    ) -> AttentionMetadata:
        """Metadata of the same tree and avals as the captured one, with new values; jit-able.

        Rows past the real batch have length 0: those given so, and those of `bs` that are not given. `req_to_token`
        holds token slots, as in SGLang; the slot that a row writes is that of its last position.

        Raises:
            ValueError: The rows do not belong together, or `req_to_token` is narrower than the longest sequence.
            NotImplementedError: The step is no decode step.
        """
        if not forward_mode.is_decode_or_idle():
            raise NotImplementedError(f"Only decode steps are captured. Got forward_mode={forward_mode.name}.")
        page_size, max_context_len = self.config.page_size, self.config.max_context_len
        if req_pool_indices.shape != seq_lens.shape:
            raise ValueError(
                "`req_pool_indices` and `seq_lens` must have the same length. "
                f"Got req_pool_indices.shape={req_pool_indices.shape}, seq_lens.shape={seq_lens.shape}."
            )
        if req_to_token.shape[1] < max_context_len:
            raise ValueError(
                f"`req_to_token` must have at least `max_context_len`={max_context_len} columns. "
                f"Got req_to_token.shape={req_to_token.shape}."
            )
        seq_lens = _rows(seq_lens, bs, self.get_cuda_graph_seq_len_fill_value())
        rows = req_to_token[_rows(req_pool_indices, bs, 0), :max_context_len].astype(jnp.int32)
        last = jnp.take_along_axis(rows, jnp.maximum(seq_lens - 1, 0)[:, None], axis=1)[:, 0]
        nowhere = jnp.iinfo(jnp.int32).max
        return AttentionMetadata(
            seq_lens=seq_lens,
            cu_q_lens=jnp.arange(bs + 1, dtype=jnp.int32),
            page_tables=(rows[:, ::page_size] // page_size,),
            slots=(jnp.where(seq_lens > 0, last, nowhere),),
            schedules=self._schedules(seq_lens, None, 1),
            max_seq_len_q=1,
            max_seq_len_k=max_context_len,
        )

    def _schedules(self, seq_lens: Array, cu_q_lens: Array | None, num_tokens: int) -> tuple[Any, ...]:
        return tuple(
            make_schedule(
                seq_lens,
                cu_q_lens,
                spec=spec_of(layer),
                num_tokens=num_tokens,
                dtype=self.config.dtype,
                page_size=self.config.page_size,
                implementation=self.config.implementation,
            )
            for layer in self.config.layers
        )

    def _schedule(self, layer: AttentionLayer, metadata: AttentionMetadata) -> Any:
        """The work list of the layer's kind, if the backend knows it; which page layout it has does not matter."""
        kinds = [spec_of(known) for known in self.config.layers]
        return metadata.schedules[kinds.index(spec_of(layer))] if spec_of(layer) in kinds else None


def _rows(values: Int[Array, " B"], bs: int, fill: int) -> Int[Array, " bs"]:
    """The first `bs` values; `fill` where there are fewer."""
    values = values[:bs].astype(jnp.int32)
    return jnp.pad(values, (0, bs - values.shape[0]), constant_values=fill)


def spec_of(layer: AttentionLayer, page_layout: PageLayout = "NHD") -> AttentionSpec:
    """A layer's facts in the kernels' words."""
    return AttentionSpec(
        num_q_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        sm_scale=layer.scaling,
        logits_soft_cap=layer.logit_cap or None,
        window_left=layer.sliding_window_size if layer.sliding_window_size >= 0 else None,
        chunk_size=layer.chunk_size,
        page_layout=page_layout,
    )


def _saved(pool: KVPool, layer: AttentionLayer, metadata: AttentionMetadata, k, v) -> KVPool:
    if (k is None) != (v is None):
        raise ValueError("`k` and `v` must be given together or both be None.")
    return pool if k is None else pool.write(layer.group, layer.layer_id, metadata.slots[layer.group], k, v)
