"""What vLLM v1's surface refuses, and what its layers tell."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.vllm import v0, v1
from jattn.vllm import v1_flash_attention as flash

SIZES = {"num_heads": 4, "head_size": 32, "scale": 0.25, "num_kv_heads": 2}
DECODES = ([1, 1, 1], [33, 7, 0], 3, 1)


def make_impl(**changes):
    return flash.FlashAttentionImpl(
        **(SIZES | {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | changes)
    )


def make_common(q_lens, seq_lens, tokens, longest):
    table = 1 + np.random.default_rng(0).permutation(15).reshape(5, 3)[: len(q_lens)].astype(np.int32)
    places = [(b, p) for b, (q, n) in enumerate(zip(q_lens, seq_lens, strict=True)) for p in range(n - q, n)]
    slots = [int(table[b, p // 16]) * 16 + p % 16 if p >= 0 else -1 for b, p in places]
    return v1.CommonAttentionMetadata(
        query_start_loc=jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
        seq_lens=jnp.array(seq_lens, jnp.int32),
        num_reqs=len(q_lens),
        num_actual_tokens=tokens,
        max_query_len=longest,
        block_table_tensor=jnp.asarray(table),
        slot_mapping=jnp.array(slots + [-1] * (tokens - len(slots)), jnp.int32),
    )


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only", "encoder_decoder"])
def test_layer_that_is_no_decoders_own_is_refused(attn_type):
    with pytest.raises(NotImplementedError, match=f"v1 has decoders only: use `jattn.vllm.v0`. Got .*'{attn_type}'"):
        make_impl(attn_type=attn_type)


@pytest.mark.parametrize(
    ("of_impl", "arguments", "error", "message"),
    [
        ({}, {"output_scale": jnp.ones(())}, NotImplementedError, "`output_scale` must be None"),
        ({}, {"key": None}, ValueError, "`key` and `value` must be given together"),
        ({}, {"kv_cache": None}, ValueError, "`kv_cache` must be given"),
        ({"use_irope": True}, {}, ValueError, "`attention_chunk_size` of the configuration"),
    ],
)
def test_call_of_what_does_not_belong_together_is_refused(of_impl, arguments, error, message):
    builder = flash.FlashAttentionMetadataBuilder(flash.KVCacheSpec(16), v1.VllmConfig({}))
    call = {"query": random(0, 3, 4, 32), "key": random(1, 3, 2, 32), "value": random(2, 3, 2, 32)}
    call |= {"kv_cache": random(3, 2, 16, 16, 2, 32), "attn_metadata": builder.build(0, make_common(*DECODES))}
    with pytest.raises(error, match=message):
        make_impl(**of_impl).forward(v0.AttentionLayer(), **(call | arguments))


def test_impl_gives_the_parameters_that_layers_share():
    layers = {"a": make_impl(sliding_window=8, logits_soft_cap=0.0), "b": make_impl(sliding_window=8)}
    parameters = v1.get_per_layer_parameters(v1.VllmConfig(layers), flash.FlashAttentionImpl)
    assert v1.infer_global_hyperparameters(parameters) == v1.PerLayerParameters(7, None, 0.25)
