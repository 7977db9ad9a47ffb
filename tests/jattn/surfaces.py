"""The surfaces as the tests call them: each takes the same batch and answers in the same form."""

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
from jattn.vllm import v0, v1, v1_flash_attention
from tests.jattn.surface_batches import (
    CONTEXT,
    LAYER,
    LAYERS,
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
)


class Surface:
    """A surface made for a case: `step` is its whole step, metadata, write and attention, with the pool donated."""

    def __init__(self, case: Case):
        self.case = case
        self.step = jax.jit(self._step, donate_argnums=0)

    @staticmethod
    def serves(case: Case) -> bool:
        """Whether the surface has what the case asks for."""
        raise NotImplementedError

    def pool(self, k_pages: Any, v_pages: Any) -> Any:
        """The pool whose layer has these pages."""
        raise NotImplementedError

    def pages(self, pool: Any) -> tuple[Any, Any]:
        """The layer's pages."""
        raise NotImplementedError

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        """What the step takes beside the pool."""
        raise NotImplementedError

    def _step(self, pool: Any, *arguments: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def places(self, batch: Batch) -> np.ndarray:
        """Which of the step's tokens are the real ones."""
        return np.arange(len(batch.q))

    def tokens(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Queries, keys and values of the bucket, NaN where padded."""
        return tuple(jnp.asarray(batch.padded(x)) for x in (batch.q, batch.k, batch.v))

    def memory(self, batch: Batch, num_pages: int) -> tuple[int, Any]:
        """Bytes of a pool of `num_pages`, and what the compiled step says of its memory."""
        shape = batch.pages(batch.k_before).shape[1:]
        pages = jax.ShapeDtypeStruct((num_pages, *shape), batch.case.stored_dtype)
        pool = jax.eval_shape(self.pool, pages, pages)
        compiled = self.step.lower(pool, *self.arguments(batch)).compile()
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool)), compiled.memory_analysis()

    def run(self, batch: Batch) -> tuple[np.ndarray, Any]:
        """What the step says of the bucket's tokens, and its pool."""
        before = (jnp.asarray(batch.pages(rows)) for rows in (batch.k_before, batch.v_before))
        out, pool = self.step(self.pool(*before), *self.arguments(batch))
        return np.asarray(out), pool

    def check(self, batch: Batch) -> np.ndarray:
        """Runs a batch, asserts what it wrote and what padded tokens say, and returns what the real ones say."""
        out, pool = self.run(batch)
        for pages, rows in zip(self.pages(pool), (batch.k_after, batch.v_after), strict=True):
            np.testing.assert_array_equal(
                np.asarray(pages).astype(np.float32), batch.pages(rows).astype(np.float32), type(self).__name__
            )
        np.testing.assert_array_equal(np.delete(out, self.places(batch), axis=0), 0)
        return out[self.places(batch)]


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
        k_scale=k_scale,
        v_scale=v_scale,
    )


def among_layers(pages: Any) -> Any:
    """A layer's pages among those of other layers, which are NaN."""
    return jnp.full((LAYERS, *pages.shape), jnp.nan, pages.dtype).at[LAYER].set(pages)


class _OverThePool(Surface):
    """SGLang's and pymllm's backends: the same batch and pool."""

    backend: AttentionBackend

    def pool(self, k_pages: Any, v_pages: Any) -> KVPool:
        k, v = among_layers(k_pages), among_layers(v_pages)
        return KVPool((KVGroup(k=k, v=v, name="all", page_layout=self.case.page_layout),))

    def pages(self, pool: KVPool) -> tuple[Any, Any]:
        return pool.groups[0].k[LAYER], pool.groups[0].v[LAYER]

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        lens = batch.kv_lens - batch.q_lens if batch.case.mode == "verify" else batch.kv_lens
        tokens = jnp.zeros(batch.case.num_tokens, jnp.int32)
        forward_batch = ForwardBatch(
            forward_mode=MODES[batch.case.mode],
            input_ids=tokens,
            positions=tokens,
            seq_lens=jnp.asarray(lens),
            cu_q_lens=jnp.asarray(batch.starts),
            out_cache_loc=(jnp.asarray(batch.padded(batch.slots.astype(np.int32), NOWHERE)),),
            req_pool_indices=jnp.asarray(batch.requests),
            req_to_token_pool=ReqToTokenPool(jnp.asarray(batch.req_to_token)),
        )
        return (forward_batch, *self.tokens(batch))

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
                implementation="xla",
            )
        )

    @staticmethod
    def serves(case: Case) -> bool:
        return True


class Pymllm(_OverThePool):
    """Ragged where nothing is rounded between the keys that come and those that are stored, and pages are "NHD"."""

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
            num_draft_tokens=NUM_DRAFT,
            implementation="xla",
        )

    @staticmethod
    def serves(case: Case) -> bool:
        return case.chunk_size is None

    def _metadata(self, forward_batch: ForwardBatch) -> Any:
        ragged = self.case.kv_cache_dtype == "auto" and self.case.page_layout == "NHD"
        return self.backend.init_forward_metadata(forward_batch, use_ragged=ragged)


class FlashInfer(Surface):
    """The wrappers, planned on the host for buffers that fit every batch of the case."""

    def __init__(self, case: Case):
        super().__init__(case)
        rows, lists = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (ROWS + 1, ROWS * case.max_pages))
        last = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        layout, options = case.page_layout, {"implementation": "xla"}
        if case.mode == "decode":
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
        if case.mode == "decode":
            return self.wrapper.plan(*lists, N, K, H, **facts)
        return self.wrapper.plan(starts, *lists, N, K, H, causal=True, **facts)

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        size, lens = batch.case.page_size, batch.kv_lens[:REAL_ROWS]
        held = -(-lens // size)
        indptr = np.concatenate([[0], np.cumsum(held)]).astype(np.int32)
        rows = zip(batch.requests, held, strict=False)
        indices = np.concatenate([batch.page_table[request, :count] for request, count in rows])
        last = (lens - size * (held - 1)).astype(np.int32)
        planned = self._plan(batch.starts[: REAL_ROWS + 1], (indptr, indices, last))
        indices = np.pad(indices, (0, ROWS * batch.case.max_pages - len(indices)))
        lists = (jnp.asarray(x) for x in (indices, indptr, last))
        starts = jnp.asarray(np.cumsum([0, *batch.q_lens[:REAL_ROWS]]).astype(np.int32))
        return (planned, starts, *lists, *self.tokens(batch))

    def _step(self, pool: Any, planned: Any, starts: Any, indices: Any, indptr: Any, last: Any, q: Any, k: Any, v: Any):
        lens = flashinfer.get_seq_lens(indptr, last, self.case.page_size)
        where = flashinfer.get_batch_indices_positions(starts, lens, self.case.num_tokens)
        scales = dict(zip(("k_scale", "v_scale"), self.case.scales, strict=True))
        options = {"layer_index": LAYER, **scales}
        pool = flashinfer.append_paged_kv_cache(
            k, v, *where, pool, indices, indptr, last, self.case.page_layout, **options
        )
        return self.wrapper.run(q, pool, planned=planned, **options), pool


class _OverCombinedCache(Surface):
    """vLLM's: keys and values in one array of one layer."""

    impl: v0.FlashAttentionImpl

    def pool(self, k_pages: Any, v_pages: Any) -> Any:
        return jnp.stack([k_pages, v_pages])

    def pages(self, pool: Any) -> tuple[Any, Any]:
        return pool[0], pool[1]

    def _impl(self, impl: type[v0.FlashAttentionImpl]) -> v0.FlashAttentionImpl:
        case = self.case
        return impl(
            num_heads=N,
            head_size=H,
            scale=SCALE,
            num_kv_heads=K,
            alibi_slopes=None,
            sliding_window=None if case.window_left is None else case.window_left + 1,
            kv_cache_dtype=case.kv_cache_dtype,
            logits_soft_cap=case.logits_soft_cap,
            use_irope=case.chunk_size is not None,
        )

    def _attend(self, pool: Any, metadata: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return self.impl.forward(v0.AttentionLayer(None, *self.case.scales), q, k, v, pool, metadata)


class VllmV0(_OverCombinedCache):
    """Its builder pads prefills and decodes each on their own."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.impl = self._impl(v0.FlashAttentionImpl)
        self.builder = v0.FlashAttentionMetadataBuilder(
            v0.InputBuilder(
                block_size=case.page_size,
                max_model_len=CONTEXT,
                max_decode_query_len=case.q_len or 1,
                num_prefills=case.num_prefills + 1,
                num_prefill_tokens=case.num_tokens,
                attention_chunk_size=case.chunk_size,
            )
        )

    @staticmethod
    def serves(case: Case) -> bool:
        return case.page_size % 16 == 0 and case.page_layout == "NHD"

    def places(self, batch: Batch) -> np.ndarray:
        prefill_tokens = batch.starts[batch.case.num_prefills]
        decodes = np.arange(prefill_tokens, len(batch.q))
        shift = batch.case.num_tokens - prefill_tokens if batch.case.num_prefills else 0
        return np.concatenate([np.arange(prefill_tokens), decodes + shift])

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        self.builder.prepare()
        for row in range(REAL_ROWS):
            held = -(-int(batch.kv_lens[row]) // batch.case.page_size)
            group = v0.InterDataForSeqGroup(
                is_prompt=row < batch.case.num_prefills,
                seq_ids=[row],
                seq_lens=[int(batch.kv_lens[row])],
                query_lens=[int(batch.q_lens[row])],
                context_lens=[int(batch.prefix_lens[row])],
                block_tables={row: batch.page_table[batch.requests[row], :held].tolist()},
            )
            self.builder._add_seq_group(group, True, False)
        lens = (x[:REAL_ROWS].tolist() for x in (batch.kv_lens, batch.q_lens))
        metadata = self.builder.build(*lens, 1, len(batch.q) + 1)
        tokens = metadata.num_prefill_tokens + metadata.num_decode_tokens
        placed = []
        for real in (batch.q, batch.k, batch.v):
            whole = np.full((tokens, *real.shape[1:]), np.nan, np.float32)
            whole[self.places(batch)] = real
            placed.append(jnp.asarray(whole))
        return (metadata, *placed)

    def _step(self, pool: Any, *arguments: Any) -> tuple[Any, Any]:
        return self._attend(pool, *arguments)


class VllmV1(_OverCombinedCache):
    def __init__(self, case: Case):
        super().__init__(case)
        self.impl = self._impl(v1_flash_attention.FlashAttentionImpl)
        self.builder = v1_flash_attention.FlashAttentionMetadataBuilder(
            v1_flash_attention.KVCacheSpec(case.page_size),
            v1.VllmConfig({}, attention_chunk_size=case.chunk_size),
        )

    @staticmethod
    def serves(case: Case) -> bool:
        return case.page_size % 16 == 0

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        common = v1.CommonAttentionMetadata(
            query_start_loc=jnp.asarray(batch.starts),
            seq_lens=jnp.asarray(batch.kv_lens),
            num_reqs=ROWS,
            num_actual_tokens=batch.case.num_tokens,
            max_query_len=batch.case.q_len or batch.case.num_tokens,
            block_table_tensor=jnp.asarray(batch.page_table[batch.requests]),
            slot_mapping=jnp.asarray(batch.padded(batch.slots.astype(np.int32), -1)),
        )
        return (common, *self.tokens(batch))

    def _step(self, pool: Any, common: Any, *tokens: Any) -> tuple[Any, Any]:
        return self._attend(pool, self.builder.build(0, common), *tokens)


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
    return {name: surface(case) for name, surface in SURFACES.items() if surface.serves(case)}
