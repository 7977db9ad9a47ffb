"""FlashAttentionBackend: SGLang's backend surface over jattn's kernels."""

import dataclasses
from operator import attrgetter

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.arguments import check_whole, in_words, instance, integers, scale_arrays, whole
from jattn.attention.backend import BackendOptions
from jattn.attention.latent_heads import LatentHeads
from jattn.attention.layer import AttentionLayer
from jattn.forward_batch import ForwardBatch, ForwardMode, checked_batch
from jattn.kv_pool import KVPool
from jattn.matmul import Splits
from jattn.norm import HeadNorms
from jattn.rotary import Angles
from jattn.spec_info import EagleDraftInput, EagleVerifyInput, SpecInput
from jattn.surfaces.checks import WORDS, as_given, checked_rows, saved
from jattn.surfaces.cuda_graph_state import CudaGraphState
from jattn.surfaces.places import NOWHERE, replayed_batch
from jattn.surfaces.sglang.building import Builder
from jattn.surfaces.sglang.config import FlashAttentionConfig
from jattn.surfaces.sglang.metadata import FlashAttentionMetadata
from jattn_kernels import RawLatents
from jattn_kernels.packed_latents import is_packed


@dataclasses.dataclass(frozen=True)
class FlashAttentionBackend:
    """Static and hashable: arrays come in through calls, metadata and pool go out of them.

    Attributes:
        config: What SGLang's backend reads from its model runner.
        skip_prefill: Kept as SGLang keeps it: nothing here is made for prefill alone.
        speculative_step_id: Which draft step this backend serves, from 0.
        topk: Branches a drafted sequence has; 0 and 1 are a chain.
        speculative_num_steps: Draft steps in all.

    Raises:
        ValueError: `config` is of another type, or a number below 0.
    """

    config: FlashAttentionConfig
    skip_prefill: bool = False
    speculative_step_id: int = 0
    topk: int = 0
    speculative_num_steps: int = 0

    def __post_init__(self):
        instance("config", self.config, FlashAttentionConfig)
        check_whole(self, "speculative_step_id", "topk", "speculative_num_steps", least=0)

    @classmethod
    def for_model(cls, layers: tuple[AttentionLayer, ...], options: BackendOptions) -> "FlashAttentionBackend":
        """The backend of a model's layers, one given of each kind; `max_num_seqs` bounds nothing here.

        Raises:
            NotImplementedError: Results are to be batch-invariant, or some layers alone read latent rows.
        """
        instance("options", options, BackendOptions)
        kinds = {layer.kv for layer in layers}
        if len(kinds) > 1:
            raise NotImplementedError(
                "Layers of a FlashAttention backend must all read latent rows, or none of them, a draft model's among "
                f"them: use `paged`. Got {' and '.join(sorted(kinds))}."
            )
        facts = dataclasses.asdict(options)
        if facts.pop("batch_invariant"):
            raise NotImplementedError("`flash_attention` does not promise `batch_invariant`: use `paged`.")
        del facts["max_num_seqs"]
        arch = "MLA" if "latent" in kinds else "MHA"
        return cls(FlashAttentionConfig(layers=layers, attention_arch=arch, **facts))

    max_context_len = property(attrgetter("config.max_context_len"), doc="Longest sequence, in tokens.")
    page_size = property(attrgetter("config.page_size"), doc="Tokens a page.")
    use_mla = property(attrgetter("config.use_mla"), doc="Whether layers read latent rows.")
    kv_cache_dtype = property(attrgetter("config.stored_dtype"), doc="The dtype of the pool.")
    kv_cache_dtype_str = property(attrgetter("config.kv_cache_dtype"), doc='Its name; with "auto" scales are not used.')
    attention_chunk_size = property(attrgetter("config.attention_chunk_size"), doc="As the configuration's.")
    speculative_num_draft_tokens = property(
        attrgetter("config.speculative_num_draft_tokens"), doc="Tokens a sequence in target verify."
    )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> FlashAttentionMetadata:
        """Metadata of a batch, once for all layers; jit-able.

        In drafting `out_cache_loc` may be that of all steps, [B, topk, num_steps] flat, of which this step's is taken.

        Raises:
            ValueError: The batch says neither its pages nor its requests, or its tokens and rows do not go together.
        """
        forward_batch = checked_batch(forward_batch)
        q_len = self._builder.q_len(forward_batch.forward_mode, forward_batch.spec_info)
        slots = forward_batch.out_cache_loc
        if q_len is not None:
            slots = tuple(self._of_this_step(group_slots, forward_batch.batch_size * q_len) for group_slots in slots)
        return self._builder.build(forward_batch, self._builder.places(forward_batch), slots)

    @in_words(**WORDS)
    def forward_extend(
        self,
        q: Float[Array, "..."],
        k: Float[Array, "..."] | None,
        v: Float[Array, "..."] | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        metadata: FlashAttentionMetadata,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "..."], KVPool]:
        """Writes this pass's keys and values, then attends; many tokens a sequence. The pool may be donated.

        `q`, `k` and `v` have an axis of heads, or those one after the other; the output is like `q`.

        Raises:
            ValueError: `k` or `v` is missing, or the layer is one of cross attention and the batch has no encoder.
            NotImplementedError: The layer does not serve drafted trees.
        """
        instance("metadata", metadata, FlashAttentionMetadata)
        given = q
        q, k, v = checked_rows(q, k, v, layer, forward_batch, pool)
        layer = self.config.paged_layer(layer)
        self._check_call(q, layer, metadata, pool)
        used = (layer.k_scale, layer.v_scale) if self.config.is_fp8 else (None, None)
        layer = dataclasses.replace(layer, **scale_arrays(k_scale=used[0], v_scale=used[1]))
        if save_kv_cache:
            pool = saved(pool, layer, forward_batch, metadata.slots, k, v)
        out, pool = self.config.paged_backend.forward_extend(
            self._stored(q, layer), None, None, layer, forward_batch, metadata, pool
        )
        return as_given(out.astype(q.dtype), given), pool

    forward_decode = forward_extend  # one token a sequence, or one a branch in drafting

    def save_rotated(
        self,
        qkv: Float[Array, "T heads H"] | Splits,
        angles: Angles,
        layer: AttentionLayer,
        metadata: FlashAttentionMetadata,
        pool: KVPool,
        norms: HeadNorms | None = None,
    ) -> tuple[Float[Array, "T N H"], KVPool]:
        """Turned queries, and the pool with this pass's turned keys and values. The pool may be donated."""
        return self.config.paged_backend.save_rotated(qkv, angles, layer, metadata, pool, norms)

    def save_latents(
        self, latents: RawLatents, layer: AttentionLayer, metadata: FlashAttentionMetadata, pool: KVPool
    ) -> tuple[Float[Array, "T 1 W"], KVPool] | None:
        """As the backend that attends."""
        return self.config.paged_backend.save_latents(latents, self.config.paged_layer(layer), metadata, pool)

    def extend_latent(
        self,
        q_nope: Float[Array, "T N D"],
        q_pe: Float[Array, "T N R"],
        rows: Float[Array, "T 1 W"],
        heads: LatentHeads,
        layer: AttentionLayer,
        metadata: FlashAttentionMetadata,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "T N V"], KVPool] | None:
        """As the backend that attends."""
        layer, extend = self.config.paged_layer(layer), self.config.paged_backend.extend_latent
        return extend(q_nope, q_pe, rows, heads, layer, metadata, pool, save_kv_cache)

    def mixes(self) -> bool:
        """As the backend that attends."""
        return self.config.paged_backend.mixes()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length that fills a bucket's unused rows."""
        return 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int | None = None) -> CudaGraphState:
        """The static sizes for steps of at most `max_bs` sequences and `max_num_tokens` tokens, `max_bs` if None."""
        return CudaGraphState(max_bs, max_bs if max_num_tokens is None else max_num_tokens, self.config.max_pages)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Int[Array, " B"],
        seq_lens: Int[Array, " B"],
        encoder_lens: Int[Array, " B"] | None,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
        *,
        req_to_token: Int[Array, "R slots"],
    ) -> FlashAttentionMetadata:
        """Example metadata to compile a step of `bs` rows with; the arguments' values do not matter.

        Raises:
            ValueError: `num_tokens` is not that of `bs` rows in this mode; or as the replay.
            NotImplementedError: As the replay.
        """
        whole("bs", bs)
        if (expected := bs * self._captured_q_len(forward_mode, spec_info)) != num_tokens:
            raise ValueError(
                f"`num_tokens` must be {expected} for `bs` rows in {forward_mode.name}. "
                f"Got bs={bs}, num_tokens={num_tokens}."
            )
        seq_lens = jnp.zeros_like(integers("seq_lens", seq_lens, "rows"))  # none lacks room for what is drafted
        return self.init_forward_metadata_replay_cuda_graph(
            bs, req_pool_indices, seq_lens, None, encoder_lens, forward_mode, spec_info, None, req_to_token=req_to_token
        )

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Int[Array, " B"],
        seq_lens: Int[Array, " B"],
        seq_lens_sum: int | None,
        encoder_lens: Int[Array, " B"] | None,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
        seq_lens_cpu: Int[Array, " B"] | None,
        out_cache_loc: Int[Array, " T"] | None = None,
        *,
        req_to_token: Int[Array, "R slots"],
    ) -> FlashAttentionMetadata:
        """Metadata of the same tree and avals as the captured one, with new values; jit-able.

        Rows past the real batch have length 0: those given so, and those of `bs` that are not given.

        Args:
            seq_lens_sum, seq_lens_cpu: Not read: bounds are the bucket's.
            spec_info: Its mask, if any, has the captured size, whatever it is filled up with.
            out_cache_loc: The slots that the given rows' tokens write; the next places of each row if None.
            req_to_token: Token slots by request and position.

        Raises:
            ValueError: The rows do not belong together, or `req_to_token` is narrower than the longest sequence.
            NotImplementedError: The step is neither decode, nor drafting, nor target verify.
        """
        whole("bs", bs)
        q_len = self._captured_q_len(forward_mode, spec_info)
        rows = (req_pool_indices, seq_lens, encoder_lens, self.get_cuda_graph_seq_len_fill_value(), req_to_token)
        batch = replayed_batch(bs, q_len, *rows, forward_mode=forward_mode, spec_info=spec_info)
        if forward_mode.is_idle():
            batch = dataclasses.replace(batch, seq_lens=jnp.zeros_like(batch.seq_lens))
        places = self._builder.places(batch)
        if out_cache_loc is None:
            return self._builder.build(batch, places, (self._builder.slots(batch, places),))
        given, out_cache_loc = len(seq_lens), integers("out_cache_loc", out_cache_loc, "tokens")
        by_row = self._of_this_step(out_cache_loc, given * q_len).reshape(given, q_len)[:bs]
        by_row = jnp.pad(by_row, ((0, bs - by_row.shape[0]), (0, 0)), constant_values=NOWHERE)
        slots = jnp.where(batch.seq_lens[:, None] > 0, by_row, NOWHERE).reshape(-1)
        return self._builder.build(batch, places, (slots,))

    @property
    def _builder(self) -> Builder:
        return Builder(self.config, self.speculative_step_id, self.topk, self.speculative_num_steps)

    def _captured_q_len(self, mode: ForwardMode, spec_info: SpecInput | None) -> int:
        instance("forward_mode", mode, ForwardMode)
        instance("spec_info", spec_info, EagleDraftInput, EagleVerifyInput, type(None))
        q_len = self._builder.q_len(mode, spec_info)
        if q_len is None:
            raise NotImplementedError(
                "Only decode, drafting and target verify are captured; jit `init_forward_metadata` for an extend step. "
                f"Got forward_mode={mode.name}."
            )
        return q_len

    def _of_this_step(self, slots: Int[Array, " n"], num_tokens: int) -> Int[Array, " T"]:
        steps = self.speculative_num_steps
        if slots.shape[0] == num_tokens:
            return slots
        if slots.shape[0] != num_tokens * steps:
            raise ValueError(
                f"`out_cache_loc` must have a slot for each of {num_tokens} tokens, or for each draft step of those. "
                f"Got out_cache_loc.shape={slots.shape}."
            )
        return slots.reshape(num_tokens, steps)[:, self.speculative_step_id]

    def _check_call(self, q: Array, layer: AttentionLayer, metadata: FlashAttentionMetadata, pool: KVPool) -> None:
        """Checks that queries, layer, metadata and pool belong together."""
        group, config, tokens = pool.groups[layer.group], self.config, metadata.slots[0].shape[0]
        if q.shape[0] != tokens:
            raise ValueError(f"`q` must have a row for each of the batch's {tokens} tokens. Got q.shape={q.shape}.")
        if (group.v is None) != (layer.kv == "latent"):
            raise ValueError(
                "`pool` must hold latent rows where `attention_arch` is MLA, and keys and values elsewhere. "
                f"Got group {group.name!r} with attention_arch={config.attention_arch}."
            )
        if group.page_size != config.page_size:
            raise ValueError(
                f"`pool` must have the configuration's pages of {config.page_size} tokens. "
                f"Got pages of {group.page_size} tokens in group {group.name!r}."
            )
        held, meant = ((dtype.itemsize == 1, is_packed(dtype)) for dtype in (group.k.dtype, config.stored_dtype))
        if held != meant:
            raise ValueError(
                "`kv_cache_dtype` must say whether `pool` is stored in fp8, as scales are used only then. "
                f"Got kv_cache_dtype={config.kv_cache_dtype!r} and a pool of {group.k.dtype}."
            )
        if metadata.custom_mask is not None and not layer.is_cross_attention:
            self._check_tree(layer, max(metadata.max_seq_len_q, self.speculative_num_steps))

    def _check_tree(self, layer: AttentionLayer, depth: int) -> None:
        """Refuses the rules that would read positions off a tree's keys, which are not at their positions."""
        if layer.chunk_size is not None:
            raise NotImplementedError("Chunked layers do not serve drafted trees; draft chains, topk=1.")
        if 0 <= layer.sliding_window_size < depth:
            raise NotImplementedError(
                f"`sliding_window_size` must be at least {depth}, the depth that a drafted tree may have; or draft "
                f"chains, topk=1. Got {layer.sliding_window_size}."
            )

    def _stored(self, q: Array, layer: AttentionLayer) -> Array:
        """The queries, in the pool's dtype if that is asked for."""
        if not (self.config.is_fp8 and self.config.quantize_queries) or layer.k_scale is None:
            return q
        limit = float(jnp.finfo(self.config.stored_dtype).max)
        return jnp.clip(q.astype(jnp.float32), -limit, limit).astype(self.config.stored_dtype)
