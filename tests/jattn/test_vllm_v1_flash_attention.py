"""What vLLM v1's surface refuses, and what its layers tell."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.vllm import v0, v1
from jattn.vllm import v1_flash_attention as flash
from jattn_kernels.call import Device

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


def builder_of(*impls, **fields):
    layers = {str(number): impl for number, impl in enumerate(impls)}
    return flash.FlashAttentionMetadataBuilder(flash.KVCacheSpec(16), v1.VllmConfig(layers, **fields))


def test_prefix_of_all_decodes_is_read_once_and_agrees_with_the_batch_without():
    impl, cache = make_impl(sliding_window=40), random(3, 2, 16, 16, 2, 32)
    common = make_common([1, 1, 0], [41, 35, 0], 3, 1)
    table = np.array(common.block_table_tensor)
    table[:, :2] = table[0, :2]
    common = dataclasses.replace(common, block_table_tensor=jnp.asarray(table))
    q = random(0, 3, 4, 32)
    once, each = (builder_of().build(prefix, common) for prefix in (34, 0))
    assert (int(once.prefix_len), once.suffix_lens.tolist(), each.prefix_len) == (32, [9, 3, 0], None)
    assert builder_of().build(34, common, fast_build=True).prefix_len is None
    outs = [impl.forward(v0.AttentionLayer(), q, None, None, cache, metadata)[0] for metadata in (once, each)]
    np.testing.assert_allclose(*outs, rtol=2e-5, atol=2e-5)


def test_queries_past_the_actual_tokens_are_padding():
    metadata, impl = builder_of().build(0, make_common([1, 1], [33, 7], 2, 1)), make_impl()
    q, k, v = random(0, 4, 4, 32), random(1, 4, 2, 32), random(2, 4, 2, 32)
    cache = random(3, 2, 16, 16, 2, 32)
    out, written = impl.forward(v0.AttentionLayer(), q, k, v, cache, metadata)
    exact, expected = impl.forward(v0.AttentionLayer(), q[:2], k[:2], v[:2], cache, metadata)
    np.testing.assert_array_equal(out, np.concatenate([exact, np.zeros((2, 4, 32))]))
    np.testing.assert_array_equal(written, expected)


def test_batch_has_a_schedule_for_each_kind_of_its_layers(monkeypatch):
    """Layers of a kind are given one, which is made with the batch."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    given = []

    def spied(q, *arrays, schedule, **options):
        given.append(schedule)
        return q

    monkeypatch.setattr("jattn.attention.paged_call.paged_decode", spied)
    impls = [make_impl(head_size=128, sliding_window=window) for window in (None, None, 8)]
    metadata = builder_of(*impls, dtype="bfloat16").build(0, make_common(*DECODES))
    q, cache = random(0, 3, 4, 128).astype(jnp.bfloat16), random(3, 2, 16, 16, 2, 128).astype(jnp.bfloat16)
    for impl in impls:
        impl.forward(v0.AttentionLayer(), q, None, None, cache, metadata)
    assert given[0] is not None
    assert given[0] is given[1]
    assert given[2] is not None
    assert given[2] is not given[0]


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
