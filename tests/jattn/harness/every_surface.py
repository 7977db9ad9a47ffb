"""Every surface as the tests call it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import flashinfer
from jattn.backend import AttentionBackend, AttentionLayer, forward
from jattn.flash_attention import FlashAttentionBackend, FlashAttentionConfig
from jattn.flashinfer import FlashInferAttnBackend
from jattn.forward_batch import ForwardBatch, ReqToTokenPool
from jattn.kv_pool import KVGroup, KVPool
from jattn.spec_info import EagleDraftInput
from jattn.surfaces.vllm import v1_flash_attention
from tests.jattn.harness.common_batches import (
    CONTEXT,
    DRAFT_STEP,
    DRAFT_STEPS,
    LAYER,
    MODES,
    NOWHERE,
    NUM_DRAFT,
    NUM_REQUESTS,
    REAL_ROWS,
    ROWS,
    SCALE,
    Batch,
    Case,
    H,
    K,
    N,
    padded,
)
from tests.jattn.harness.surface_base import Surface, among_layers
from tests.jattn.harness.vllm_surfaces import VllmV0, VllmV1


def layer_of(case: Case) -> AttentionLayer:
    """The case's layer as SGLang and pymllm have it."""
    k_scale, v_scale = case.scales
    return AttentionLayer(
        layer_id=LAYER,
        tp_q_head_num=N,
        tp_k_head_num=K,
        tp_v_head_num=K,
        head_dim=H,
        v_head_dim=H,
        scaling=SCALE,
        logit_cap=case.logits_soft_cap or 0.0,
        sliding_window_size=-1 if case.window_left is None else case.window_left,
        use_irope=case.chunk_size is not None,
        is_cross_attention=case.cross,
        k_scale=k_scale,
        v_scale=v_scale,
    )


class _OverThePool(Surface):
    """SGLang's and pymllm's backends: the same batch and pool."""

    backend: AttentionBackend

    def pool(self, k_pages: Any, v_pages: Any) -> KVPool:
        k, v = among_layers(k_pages), among_layers(v_pages)
        return KVPool((KVGroup(k=k, v=v, name="all", page_layout=self.case.page_layout),))

    def pages(self, pool: KVPool) -> tuple[Any, Any]:
        return pool.groups[0].k[LAYER], pool.groups[0].v[LAYER]

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        case, tokens = batch.case, jnp.zeros(batch.case.num_tokens, jnp.int32)
        encoder = {}
        if case.cross:
            encoder["encoder_lens"] = jnp.asarray(batch.encoder_lens)
            if case.num_new_keys:
                encoder["encoder_out_cache_loc"] = jnp.asarray(padded(batch.slots, case.num_new_keys, NOWHERE))
        forward_batch = ForwardBatch(
            forward_mode=MODES[case.mode],
            input_ids=tokens,
            positions=tokens,
            seq_lens=jnp.asarray(self._seq_lens(batch)),
            cu_q_lens=jnp.asarray(batch.starts),
            out_cache_loc=(jnp.asarray(padded(batch.token_slots, case.num_tokens, NOWHERE)),),
            req_pool_indices=jnp.asarray(batch.requests),
            req_to_token_pool=ReqToTokenPool(jnp.asarray(batch.req_to_token)),
            spec_info=self._spec_info(),
            **encoder,
        )
        return (forward_batch, *self.tokens(batch))

    def _seq_lens(self, batch: Batch) -> np.ndarray:
        """Keys of each row, but for those to be verified."""
        return batch.prefix_lens if batch.case.mode == "verify" else batch.kv_lens

    def _spec_info(self) -> EagleDraftInput | None:
        return None

    def _metadata(self, forward_batch: ForwardBatch) -> Any:
        return self.backend.init_forward_metadata(forward_batch)

    def _step(self, pool: KVPool, forward_batch: ForwardBatch, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        metadata = self._metadata(forward_batch)
        return forward(self.backend, q, k, v, layer_of(self.case), forward_batch, metadata, pool)


class SGLang(_OverThePool):
    def __init__(self, case: Case):
        super().__init__(case)
        self.backend = FlashAttentionBackend(
            FlashAttentionConfig(
                max_context_len=CONTEXT,
                page_size=case.page_size,
                kv_cache_dtype=case.kv_cache_dtype,
                attention_chunk_size=case.chunk_size,
                sliding_window_size=case.window_left,
                speculative_num_draft_tokens=NUM_DRAFT,
                is_encoder_decoder=case.cross,
                implementation="xla",
            ),
            speculative_step_id=DRAFT_STEP,
            topk=1,
            speculative_num_steps=DRAFT_STEPS,
        )

    @staticmethod
    def serves(case: Case) -> bool:
        return True

    def _seq_lens(self, batch: Batch) -> np.ndarray:
        """Keys drafted in this step and in those before it come on top."""
        drafted = 1 + DRAFT_STEP if batch.case.mode == "draft_decode" else 0
        return np.maximum(super()._seq_lens(batch) - drafted, 0)

    def _spec_info(self) -> EagleDraftInput | None:
        return EagleDraftInput() if self.case.mode == "draft_decode" else None


class Pymllm(_OverThePool):
    """Drafting is ordinary decode here. Pages in "HND" are read in place of keys as they come."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.backend = FlashInferAttnBackend(
            num_heads=N,
            num_kv_heads=K,
            head_dim=H,
            kv_cache_dtype=case.stored_dtype,
            q_dtype="float32",
            max_context_len=CONTEXT,
            req_to_token=(NUM_REQUESTS, CONTEXT),
            device=None,
            max_req_pool_size=ROWS,
            sliding_window_size=case.window_left,
            page_size=case.page_size,
            is_encoder_decoder=case.cross,
            num_draft_tokens=NUM_DRAFT,
            implementation="xla",
        )

    @staticmethod
    def serves(case: Case) -> bool:
        return case.chunk_size is None

    def _metadata(self, forward_batch: ForwardBatch) -> Any:
        use_ragged = None if self.case.page_layout == "NHD" else False
        return self.backend.init_forward_metadata(forward_batch, use_ragged=use_ragged)


class FlashInfer(Surface):
    """The wrappers, planned on the host for buffers that fit every batch of the case."""

    def __init__(self, case: Case):
        super().__init__(case)
        rows, lists = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (ROWS + 1, ROWS * case.max_pages))
        last = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        layout, options = case.page_layout, {"implementation": "xla"}
        if case.q_len == 1:
            self.wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
                None, rows, lists, last, layout, **options
            )
            return
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            None, layout, True, rows, rows, lists, last, **options
        )
        self._plan(np.array([0, case.num_tokens]), (np.array([0, 1]), np.zeros(1, np.int32), np.ones(1, np.int32)))

    @staticmethod
    def serves(case: Case) -> bool:
        return case.chunk_size is None

    def pool(self, k_pages: Any, v_pages: Any) -> Any:
        return among_layers(k_pages), among_layers(v_pages)

    def pages(self, pool: Any) -> tuple[Any, Any]:
        return pool[0][LAYER], pool[1][LAYER]

    def _plan(self, starts: np.ndarray, lists: tuple[np.ndarray, ...]) -> Any:
        case = self.case
        facts = {
            "page_size": case.page_size,
            "window_left": -1 if case.window_left is None else case.window_left,
            "logits_soft_cap": case.logits_soft_cap,
            "sm_scale": SCALE,
            "q_data_type": "float32",
            "kv_data_type": case.stored_dtype,
        }
        if case.q_len == 1:
            return self.wrapper.plan(*lists, N, K, H, **facts)
        return self.wrapper.plan(starts, *lists, N, K, H, causal=not case.cross, **facts)

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        size, lens, first = batch.case.page_size, batch.seen_lens[:REAL_ROWS], batch.own_columns
        first = np.zeros_like(first) if batch.case.cross else first
        held = -(-lens // size)
        indptr = np.concatenate([[0], np.cumsum(held)]).astype(np.int32)
        rows = zip(batch.requests, first, held, strict=False)
        indices = np.concatenate([batch.page_table[request, begin : begin + count] for request, begin, count in rows])
        last = (lens - size * (held - 1)).astype(np.int32)
        planned = self._plan(batch.starts[: REAL_ROWS + 1], (indptr, indices, last))
        lists = (jnp.asarray(x) for x in (padded(indices, ROWS * batch.case.max_pages, 0), indptr, last))
        starts = jnp.asarray(np.cumsum([0, *batch.new_lens[:REAL_ROWS]]).astype(np.int32))
        return (planned, starts, *lists, *self.tokens(batch))

    def _step(self, pool: Any, planned: Any, starts: Any, indices: Any, indptr: Any, last: Any, q: Any, k: Any, v: Any):
        scales = dict(zip(("k_scale", "v_scale"), self.case.scales, strict=True))
        options = {"layer_index": LAYER, **scales}
        if k is not None:
            lens = flashinfer.get_seq_lens(indptr, last, self.case.page_size)
            where = flashinfer.get_batch_indices_positions(starts, lens, self.case.num_new_keys)
            pool = flashinfer.append_paged_kv_cache(
                k, v, *where, pool, indices, indptr, last, self.case.page_layout, **options
            )
        return self.wrapper.run(q, pool, planned=planned, **options), pool


SURFACES: dict[str, type[Surface]] = {
    "sglang": SGLang,
    "flashinfer": FlashInfer,
    "pymllm": Pymllm,
    "vllm_v0": VllmV0,
    "vllm_v1": VllmV1,
}


def surfaces_of(case: Case, monkeypatch: Any) -> dict[str, Surface]:
    """The surfaces that serve a case, by name; v1 takes its layout from what would be the environment."""
    layout = functools.partial(lambda layout: layout, case.page_layout)
    monkeypatch.setattr(v1_flash_attention, "get_kv_cache_layout", layout)
    return _made(case)


@functools.cache
def _made(case: Case) -> dict[str, Surface]:
    """One of each for all tests: each compiles its step once."""
    return {name: surface(case) for name, surface in SURFACES.items() if surface.serves(case)}
