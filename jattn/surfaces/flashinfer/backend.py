"""FlashInferAttnBackend: pymllm's backend surface over FlashInfer's plans."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.arguments import in_words, instance, integers, scale_arrays, whole
from jattn.attention.layer import AttentionLayer
from jattn.forward_batch import ForwardBatch, ForwardMode, checked_batch
from jattn.kv_pool import KVPool
from jattn.spec_info import EagleVerifyInput
from jattn.surfaces.checks import WORDS, as_given, checked_rows, saved
from jattn.surfaces.cuda_graph_state import CudaGraphState
from jattn.surfaces.flashinfer.config import FlashInferConfig, refuse_unserved
from jattn.surfaces.flashinfer.metadata import DecodeMetadata, PrefillMetadata, WrapperDispatch
from jattn.surfaces.flashinfer.plan import PagedPlan
from jattn.surfaces.flashinfer.planning import plan_batch
from jattn.surfaces.places import replayed_batch
from jattn_kernels import merge_state
from jattn_kernels.dispatch import works_per_sequence
from jattn_kernels.spec import AttentionSpec

BACKEND_WORDS = WORDS | {"paged_kv_cache": "pool", "paged_kv_cache[0]": "pool", "paged_kv_cache[1]": "pool"}


@dataclasses.dataclass(frozen=True)
class FlashInferAttnBackend(FlashInferConfig):
    """Static and hashable: arrays come in through calls, metadata and pool go out of them."""

    def init_forward_metadata(
        self, forward_batch: ForwardBatch, *, use_ragged: bool | None = None, extend_no_prefix: bool | None = None
    ) -> DecodeMetadata | PrefillMetadata:
        """Metadata of a batch, once for all layers; jit-able.

        Args:
            use_ragged: Whether an extend attends to its own keys as they come, and merges that with attention to those
                in pages; None does in EXTEND and MIXED, as pymllm, unless the pool rounds keys: then what a query sees
                of them would depend on where its prompt was cut.
            extend_no_prefix: The caller's promise that no sequence of an extend has keys from before. None looks at the
                lengths where they are known, and inside jit promises nothing.

        Raises:
            ValueError: The batch contradicts the backend, or its lengths, where they are known, the promise.
        """
        return plan_batch(self, checked_batch(forward_batch), use_ragged, extend_no_prefix)

    @in_words(**BACKEND_WORDS)
    def forward_extend(
        self,
        q: Float[Array, "..."],
        k: Float[Array, "..."] | None,
        v: Float[Array, "..."] | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        metadata: DecodeMetadata | PrefillMetadata,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "..."], KVPool]:
        """Writes this pass's keys and values, then attends. The pool may be donated.

        `k` and `v` may be None where the keys are in the pool already, but not with `use_ragged`, except in cross
        attention.

        Raises:
            ValueError: The layer or the arrays contradict the metadata.
        """
        instance("metadata", metadata, DecodeMetadata, PrefillMetadata)
        given = q
        q, k, v = checked_rows(q, k, v, layer, forward_batch, pool)
        if pool.groups[layer.group].v is None:
            name = pool.groups[layer.group].name
            raise ValueError(f"`pool` must hold keys and values. Got the latent group {name!r}.")
        if save_kv_cache:
            pool = saved(pool, layer, forward_batch, forward_batch.out_cache_loc, k, v)
        index = self._wrapper_index(layer)
        if isinstance(metadata, DecodeMetadata):
            return as_given(self._attend(metadata.decode_wrappers[index], q, layer, pool)[0], given), pool
        self.check_prefill()
        plan, ragged = metadata.prefill_wrappers[index], metadata.ragged
        if ragged is None or layer.is_cross_attention:
            return as_given(self._attend(plan, q, layer, pool)[0], given), pool
        if k is None or v is None:
            raise ValueError("`k` and `v` must be given with `use_ragged`. Got None.")
        out, lse = ragged.attend(q, k, v, spec=_spec_of(layer, ragged.spec))
        if not metadata.extend_no_prefix:
            out, _ = merge_state(out, lse, *self._attend(plan, q, layer, pool))
        return as_given(out, given), pool

    forward_decode = forward_extend  # one token a sequence: the metadata says which

    def mixes(self) -> bool:
        """Whether each sequence's extend costs what its own length asks for and no more, in all that it calls."""
        operations = ("ragged_extend", "paged_extend") if self.kv_cache_dtype == self.q_dtype else ("paged_extend",)
        return all(
            works_per_sequence(
                operation,
                spec=kind.spec,
                dtype=self.q_dtype,
                kv_dtype=self.kv_cache_dtype,
                page_size=self.page_size if operation == "paged_extend" else None,
                features=("layer_index",) if operation == "paged_extend" else (),
                implementation=self.implementation,
            )
            for operation in operations
            for kind in self.kinds()
            if not kind.is_cross
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length that fills a bucket's unused rows in decode: they read page 0, and what they say is ignored."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, kv_indices_buf: Any = None) -> CudaGraphState:
        """The static sizes for steps of at most `max_bs` sequences and `max_num_tokens` tokens.

        Args:
            kv_indices_buf: Only its length counts, in token slots, max_bs * max_context_len or more.

        Raises:
            ValueError: The sizes contradict each other or the backend's.
        """
        state = CudaGraphState(max_bs, max_num_tokens, -(-self.max_context_len // self.page_size))
        if max_bs > self.max_bs:
            raise ValueError(
                f"`max_bs` must be in 1 .. {self.max_bs} as the backend's batches are. Got max_bs={max_bs}."
            )
        if kv_indices_buf is not None and not hasattr(kv_indices_buf, "shape"):
            raise ValueError(f"`kv_indices_buf` must be None or an array. Got {type(kv_indices_buf).__name__}.")
        if kv_indices_buf is not None and kv_indices_buf.shape[0] < max_bs * self.max_context_len:
            raise ValueError(
                f"`kv_indices_buf` must have max_bs * max_context_len = {max_bs * self.max_context_len} entries. "
                f"Got kv_indices_buf.shape={kv_indices_buf.shape}."
            )
        return state

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Int[Array, " B"],
        seq_lens: Int[Array, " B"],
        forward_mode: ForwardMode,
        req_to_token: Int[Array, "R max_context_len"] | None = None,
        *,
        encoder_lens: Int[Array, " B"] | None = None,
        spec_info: EagleVerifyInput | None = None,
    ) -> DecodeMetadata | PrefillMetadata:
        """Example metadata to compile a decode or target-verify step of `bs` rows with; values do not matter.

        Args:
            Others: As in `init_forward_metadata_replay_cuda_graph`.

        Raises:
            ValueError: As there, or `num_tokens` is not what `bs` rows have.
        """
        whole("bs", bs)
        instance("forward_mode", forward_mode, ForwardMode)
        rows = 1 if forward_mode.is_decode_or_idle() else self.num_draft_tokens or 1
        if num_tokens != bs * rows:
            raise ValueError(f"`num_tokens` must be {rows} for each of bs={bs} rows. Got num_tokens={num_tokens}.")
        seq_lens = jnp.zeros_like(integers("seq_lens", seq_lens, "rows"))  # no mask is too short for them
        encoder: dict[str, Any] = {"encoder_lens": encoder_lens, "spec_info": spec_info}
        return self.init_forward_metadata_replay_cuda_graph(
            bs, req_pool_indices, seq_lens, None, forward_mode, None, req_to_token, **encoder
        )

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Int[Array, " B"],
        seq_lens: Int[Array, " B"],
        seq_lens_sum: Any,
        forward_mode: ForwardMode,
        seq_lens_cpu: Any,
        req_to_token: Int[Array, "R max_context_len"] | None = None,
        *,
        encoder_lens: Int[Array, " B"] | None = None,
        spec_info: EagleVerifyInput | None = None,
    ) -> DecodeMetadata | PrefillMetadata:
        """Metadata of the same tree and avals as the captured one, with new values; jit-able.

        Rows of `bs` that are not given are padding.

        Args:
            req_pool_indices, seq_lens: The rows of `req_to_token`, and the keys of each; in target verify without the
                drafted tokens.
            seq_lens_sum, seq_lens_cpu: Accepted and not used: shapes are static, lengths stay on the device.
            req_to_token: Token slots; an encoder's come first, and the decoder's begin on a new page. Outside jit that
                of the constructor, as it is now, if it is NumPy's and none is given here.
            encoder_lens: Keys of each encoder, with `is_encoder_decoder`.
            spec_info: Mask and positions of the drafted tokens, [bs * num_draft_tokens], where they are trees.

        Raises:
            ValueError: The step is neither decode nor target verify, or an argument contradicts the backend.
        """
        instance("forward_mode", forward_mode, ForwardMode)
        instance("spec_info", spec_info, EagleVerifyInput, type(None))
        whole("bs", bs, 0)
        if not (forward_mode.is_decode_or_idle() or forward_mode.is_target_verify()):
            raise ValueError(
                f"`forward_mode` must be DECODE, IDLE or TARGET_VERIFY. Got forward_mode={forward_mode.name}."
            )
        if not 1 <= bs <= self.max_bs:
            raise ValueError(f"`bs` must be in 1 .. {self.max_bs}. Got bs={bs}.")
        decode = forward_mode.is_decode_or_idle()
        if not decode and self.num_draft_tokens is None:
            raise ValueError("`num_draft_tokens` must be given to the backend for target verify. Got None.")
        table = self.host_table(seq_lens) if req_to_token is None else req_to_token
        rows = (req_pool_indices, seq_lens, encoder_lens, self.get_cuda_graph_seq_len_fill_value() if decode else 0)
        q_len = 1 if decode else self.num_draft_tokens or 1
        return plan_batch(self, replayed_batch(bs, q_len, *rows, table, forward_mode=forward_mode, spec_info=spec_info))

    def _attend(
        self, plan: PagedPlan, q: Float[Array, "T N H"], layer: AttentionLayer, pool: KVPool
    ) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
        group = pool.groups[layer.group]
        assert group.v is not None
        spec = dataclasses.replace(_spec_of(layer, plan.spec), page_layout=group.page_layout)
        scales = scale_arrays(k_scale=layer.k_scale, v_scale=layer.v_scale)
        return plan.attend(q, (group.k, group.v), spec=spec, layer_index=layer.layer_id, **scales)

    def _wrapper_index(self, layer: AttentionLayer) -> int:
        refuse_unserved(layer)
        if layer.is_cross_attention and not self.is_encoder_decoder:
            raise ValueError("`layer` may have cross attention only with `is_encoder_decoder`. Got a backend without.")
        index = 0
        match self.dispatch_reason:
            case WrapperDispatch.SLIDING_WINDOW:
                if layer.sliding_window_size not in (-1, self.sliding_window_size):
                    raise ValueError(
                        f"`layer` must have the backend's window of {self.sliding_window_size} or none (-1). "
                        f"Got layer.sliding_window_size={layer.sliding_window_size}."
                    )
                index = int(layer.sliding_window_size == -1)
            case WrapperDispatch.CROSS_ATTENTION if layer.is_cross_attention:
                return 1  # whichever group has the layer's keys: encoders' pages are one table for all
        return layer.group * len(self.kinds()) + index


def _spec_of(layer: AttentionLayer, planned: AttentionSpec) -> AttentionSpec:
    """The facts of a layer that a plan is for."""
    windowed = layer.sliding_window_size >= 0 and not layer.is_cross_attention
    return dataclasses.replace(
        planned,
        v_head_dim=None if layer.v_head_dim == layer.head_dim else layer.v_head_dim,
        sm_scale=layer.scaling,
        logits_soft_cap=layer.logit_cap if layer.logit_cap > 0 else None,
        window_left=layer.sliding_window_size if windowed else None,
    )
