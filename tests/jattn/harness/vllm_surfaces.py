"""vLLM's two surfaces as the tests call them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.vllm import v0, v1, v1_flash_attention
from tests.jattn.harness.common_batches import CONTEXT, LONGEST_ENCODER, ROWS, SCALE, Batch, Case, H, K, N, padded
from tests.jattn.harness.surface_base import Surface


class _OverCombinedCache(Surface):
    """vLLM's: keys and values in one array of one layer."""

    impl: v0.FlashAttentionImpl

    def pool(self, k_pages: Any, v_pages: Any) -> Any:
        return jnp.array(np.stack([k_pages, v_pages]))

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
            attn_type="encoder_decoder" if case.cross else "decoder",
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
                max_encoder_len=LONGEST_ENCODER if case.cross else None,
                num_encoder_tokens=case.num_new_keys or None if case.cross else None,
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
        case, size = batch.case, batch.case.page_size
        self.builder.prepare()
        for row in range(case.real_rows):
            table, first = batch.page_table[batch.requests[row]].tolist(), int(batch.own_columns[row])
            group = v0.InterDataForSeqGroup(
                is_prompt=row < case.num_prefills,
                seq_ids=[row],
                seq_lens=[int(batch.kv_lens[row])],
                query_lens=[int(batch.q_lens[row])],
                context_lens=[int(batch.prefix_lens[row])],
                block_tables={row: table[first : first - (-int(batch.kv_lens[row]) // size)]},
                encoder_seq_len=int(batch.encoder_lens[row]),
                cross_block_table=table[:first],
            )
            self.builder._add_seq_group(group, True, False)
        lens, padding = (x[: case.real_rows].tolist() for x in (batch.kv_lens, batch.q_lens)), ROWS - case.real_rows
        metadata = self.builder.build(*lens, padding, len(batch.q) + padding)
        tokens = metadata.num_prefill_tokens + metadata.num_decode_tokens

        def placed(rows: np.ndarray) -> Any:
            whole = np.full((tokens, *rows.shape[1:]), np.nan, np.float32)
            whole[self.places(batch)] = rows
            return jnp.asarray(whole)

        new = self.tokens(batch)[1:] if case.cross else (placed(batch.k), placed(batch.v))
        return (metadata, placed(batch.q), *new)

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
        return case.page_size % 16 == 0 and not case.cross

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        common = v1.CommonAttentionMetadata(
            query_start_loc=jnp.asarray(batch.starts),
            seq_lens=jnp.asarray(batch.kv_lens),
            num_reqs=ROWS,
            num_actual_tokens=batch.case.num_tokens,
            max_query_len=batch.case.q_len or batch.case.num_tokens,
            block_table_tensor=jnp.asarray(batch.page_table[batch.requests]),
            slot_mapping=jnp.asarray(padded(batch.slots, batch.case.num_tokens, -1)),
        )
        return (common, *self.tokens(batch))

    def _step(self, pool: Any, common: Any, *tokens: Any) -> tuple[Any, Any]:
        return self._attend(pool, self.builder.build(0, common), *tokens)


class Places:
    """vLLM's placeholder map, as far as the builder calls it."""

    def __init__(self, *places):
        self.places = list(places)

    def extend(self, other):
        self.places += other.places

    def index_map(self):
        return self.places
