"""What vLLM v0's surface alone serves agrees with the oracle: ALiBi, encoders, shared caches, advanced metadata."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.vllm import v0
from jattn_kernels import AttentionSpec, reference
from jattn_kernels.call import Device
from tests.jattn.harness.vllm_surfaces import Places
from tests.often import slow

LONGEST, ENCODER_LONGEST, BLOCKS = 40, 24, 24
HEADS = {"num_heads": 4, "head_size": 32, "scale": 0.25, "num_kv_heads": 2}
DEFAULT = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
# Float32 sums of up to 40 terms in another order, of numbers of size about 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def make_impl(**changes):
    return v0.FlashAttentionImpl(**(HEADS | DEFAULT | changes))


def random(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32).astype(dtype)


def config_of(block_size=16, **changes):
    sizes = {"block_size": block_size, "max_model_len": LONGEST, "attention_chunk_size": 2 * block_size}
    return v0.InputBuilder(**(sizes | {"num_prefills": 3, "num_prefill_tokens": 48} | changes))


def make_batch(seed, config, prefills=2, decodes=2, pad=1, q_len=1, encoder=False):
    """Metadata of random sequences on scattered blocks of a pool of BLOCKS, whose block 0 belongs to nobody."""
    rng = np.random.default_rng(seed)
    free = iter((1 + rng.permutation(BLOCKS - 1)).tolist())
    builder = v0.FlashAttentionMetadataBuilder(config)
    lens = []
    for row in range(prefills + decodes):
        is_prompt = row < prefills
        queries = int(rng.integers(1, 17)) if is_prompt else q_len
        context = int(rng.integers(0 if is_prompt else 1, LONGEST - queries + 1))
        total = context + queries
        blocks = [next(free) for _ in range(-(-total // config.block_size))]
        source = int(rng.integers(1, ENCODER_LONGEST + 1)) if encoder else 0
        cross = [next(free) for _ in range(-(-source // config.block_size))]
        group = v0.InterDataForSeqGroup(
            is_prompt=is_prompt,
            seq_ids=[row],
            seq_lens=[total],
            query_lens=[queries],
            context_lens=[context],
            block_tables={row: blocks},
            encoder_seq_len=source,
            cross_block_table=cross,
        )
        builder._add_seq_group(group, True, False)
        lens.append((total, queries))
    seq_lens, query_lens = (list(x) for x in zip(*lens, strict=True))
    return builder.build(seq_lens, query_lens, pad, sum(query_lens) + pad)


def make_cache(metadata=None, dtype=jnp.float32):
    """Random keys and values; given a batch, NaN in the blocks that it does not own."""
    cache = random(5, *v0.FlashAttentionBackend.get_kv_cache_shape(BLOCKS, 16, 2, 32)).astype(dtype)
    if metadata is None:
        return cache
    tables = [table for table in (metadata.block_tables, metadata.cross_block_tables) if table is not None]
    nobodys = np.setdiff1d(np.arange(BLOCKS), np.concatenate([np.unique(table[table != 0]) for table in tables]))
    return cache.at[:, nobodys].set(jnp.nan)


def q_k_v(tokens, key_tokens=None):
    return random(1, tokens, 4, 32), *(random(s, key_tokens or tokens, 2, 32) for s in (2, 3))


def tokens_of(metadata):
    return metadata.num_prefill_tokens + metadata.num_decode_tokens


def written(cache, slots, k, v, scales=(1.0, 1.0)):
    """The cache after rows were written by hand, in float64 rounded to its dtype."""
    cache = np.array(cache)
    for half, rows, scale in ((0, k, scales[0]), (1, v, scales[1])):
        for slot, row in zip(np.asarray(slots), np.asarray(rows / scale), strict=True):
            if slot >= 0:
                cache[half, slot // cache.shape[2], slot % cache.shape[2]] = row.astype(cache.dtype)
    return cache


def oracle(q, cache, metadata, cross=False, **features):
    """Rows one after the other, by their real tokens."""
    facts = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "sm_scale": 0.25, "combined_pool": "kv_first"}
    options = {name: features.pop(name) for name in ("alibi_slopes", "k_scale", "v_scale") if name in features}
    spec = AttentionSpec(**facts, **features)
    table = np.asarray(metadata.cross_block_tables if cross else metadata.block_tables)
    lens = np.asarray(metadata.encoder_seq_lens_tensor if cross else metadata.seq_lens_tensor)
    starts = np.asarray(metadata.query_start_loc)
    out = np.zeros(q.shape)
    for b, length in enumerate(lens):
        first, count = starts[b], starts[b + 1] - starts[b]
        if b >= metadata.num_prefills:
            first += metadata.num_prefill_tokens - starts[metadata.num_prefills]
        if count == 0:
            continue
        rows = slice(first, first + count)
        one = np.array([0, count], np.int32)
        out[rows] = reference.paged_extend(
            np.asarray(q[rows]), cache, None, table[b : b + 1], np.array([length]), one, spec=spec, **options
        )
    return out


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5)
def step(impl, layer, q, k, v, cache, metadata):
    return impl.forward(layer, q, k, v, cache, metadata)


SLOPES = (0.5, 0.25, 0.1, 0.05)


@pytest.mark.parametrize("padded", [True, slow(False)])
def test_decoder_with_alibi_writes_then_agrees_with_the_oracle(padded):
    unpadded = {"num_prefills": None, "num_prefill_tokens": None}
    metadata = make_batch(7, config_of()) if padded else make_unpadded(config_of(**unpadded))
    q, k, v = q_k_v(tokens_of(metadata))
    expected = written(make_cache(metadata), metadata.slot_mapping, k, v)
    impl = make_impl(alibi_slopes=list(SLOPES))
    out, cache = step(impl, v0.AttentionLayer(), q, k, v, make_cache(metadata), metadata)
    np.testing.assert_array_equal(cache, expected)
    np.testing.assert_allclose(out, oracle(q, expected, metadata, alibi_slopes=np.array(SLOPES)), **CLOSE)


def make_unpadded(config, **changes):
    """Two prefills without a prefix, whose tokens and rows are not padded."""
    builder = v0.FlashAttentionMetadataBuilder(config)
    facts = {"is_prompt": True, "seq_ids": [4, 9], "seq_lens": [5, 20], "query_lens": [5, 20], "context_lens": [0, 0]}
    tables = {"block_tables": {4: [3], 9: [7, 2]}}
    builder._add_seq_group(v0.InterDataForSeqGroup(**(facts | tables | changes)), False, False)
    return builder.build([5, 20], [5, 20], -1, 25)


def test_captured_metadata_is_that_of_every_batch_of_decodes():
    state = v0.FlashAttentionBackend.get_state_cls()(config_of())
    captured = state.graph_capture_get_metadata_for_batch(4)
    for decodes, pad in ((4, 0), (1, 3)):
        metadata = make_batch(3, config_of(), prefills=0, decodes=decodes, pad=pad)
        assert jax.tree.structure(metadata) == jax.tree.structure(captured)
        assert [x.shape for x in jax.tree.leaves(metadata)] == [x.shape for x in jax.tree.leaves(captured)]


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8", jnp.float8_e4m3fn), ("fp8_e4m3", jnp.float8_e4m3fn), ("fp8_e5m2", jnp.float8_e5m2)]
)
def test_fp8_rows_are_scaled_into_a_cache_of_that_dtype(name, dtype):
    slots, (_, k, v) = jnp.array([17, 99, -1], jnp.int32), q_k_v(3)
    layer, impl = v0.AttentionLayer(None, jnp.float32(0.5), jnp.float32(2.0)), make_impl(kv_cache_dtype=name)
    cache = impl.save(layer, k, v, make_cache(dtype=dtype), slots)
    np.testing.assert_array_equal(cache, written(make_cache(dtype=dtype), slots, k, v, (0.5, 2.0)))
    with pytest.raises(ValueError, match=f"for kv_cache_dtype='{name}'. Got kv_cache.dtype=float32"):
        impl.save(layer, k, v, make_cache(), slots)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("q_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_q_scale_is_of_queries_in_fp8_alone(paged, q_dtype):
    """vLLM divides by it while it quantises queries, so what comes in 16 bits is the query itself."""
    fp8 = jnp.float8_e4m3fn
    metadata = make_unpadded(config_of(num_prefills=None, num_prefill_tokens=None))
    cache = random(5, *v0.FlashAttentionBackend.get_kv_cache_shape(BLOCKS, 16, 2, 32)).astype(fp8)
    kv_dtype = q_dtype if not paged else jnp.bfloat16
    (q, *kv), scale = q_k_v(25), 0.25
    q, k, v = (2 * q).astype(q_dtype), *(x.astype(kv_dtype) for x in kv)
    impl = make_impl(kv_cache_dtype="fp8")
    layer = v0.AttentionLayer(jnp.float32(scale), jnp.float32(1), jnp.float32(1))
    out, cache = impl.forward(layer, q, None if paged else k, None if paged else v, cache if paged else None, metadata)
    exact_q = np.asarray(q, np.float64) * (scale if q_dtype == fp8 else 1)
    if paged:
        exact = oracle(exact_q, np.asarray(cache).astype(np.float64), metadata)
    else:
        spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, sm_scale=0.25)
        starts = np.array([0, 5, 25])
        exact = reference.ragged_extend(
            exact_q, *(np.asarray(x, np.float64) for x in (k, v)), starts, starts, spec=spec
        )
    rounding = float(jnp.finfo(out.dtype).eps)
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=rounding, atol=4 * 2.0**-8)


def test_advance_step_past_the_block_table_writes_nowhere():
    metadata = make_batch(4, config_of(), prefills=0, decodes=2, pad=0)
    width = 16 * metadata.block_tables.shape[1]
    metadata = dataclasses.replace(metadata, seq_lens_tensor=jnp.array([width, width - 1], jnp.int32))
    tokens = jnp.zeros(2, jnp.int32)
    after, _ = metadata.advance_step(v0.ModelInput(tokens, tokens), tokens, 16, 2, 2)
    assert after.slot_mapping.tolist() == [v0.PAD_SLOT_ID, int(metadata.block_tables[1, -1]) * 16 + 15]


def test_builder_collects_the_groups_that_its_input_builder_has():
    """They are of vLLM's own type, whatever it is; scales may be calculated by the layer, as vLLM always says."""
    facts = {"is_prompt": True, "context_lens": [0]}
    groups = [
        types.SimpleNamespace(
            **facts,
            seq_ids=[i],
            seq_lens=[n],
            query_lens=[n],
            block_tables={i: blocks},
            multi_modal_placeholder_maps=maps,
        )
        for i, n, blocks, maps in ((4, 5, [3], {"image": Places(2)}), (9, 20, [7, 2], {"image": Places(11)}))
    ]
    unpadded = {"num_prefills": None, "num_prefill_tokens": None}
    builder = v0.FlashAttentionMetadataBuilder(config_of(**unpadded, inter_data_list=groups))
    metadata, same = builder.build([5, 20], [5, 20], -1, 25), make_unpadded(config_of(**unpadded))
    np.testing.assert_array_equal(metadata.slot_mapping, same.slot_mapping)
    np.testing.assert_array_equal(metadata.block_tables, same.block_tables)
    assert metadata.multi_modal_placeholder_index_maps == {"image": [2, 11]}
    assert metadata.enable_kv_scales_calculation
    q, k, v = q_k_v(25)
    metadata = dataclasses.replace(metadata, multi_modal_placeholder_index_maps=None)
    outs = [step(make_impl(), v0.AttentionLayer(), q, k, v, make_cache(m), m)[0] for m in (metadata, same)]
    np.testing.assert_array_equal(*outs)


def test_irope_without_a_chunk_size_sees_all_keys():
    metadata = make_batch(7, config_of(attention_chunk_size=None))
    q, k, v = q_k_v(tokens_of(metadata))
    arguments = (v0.AttentionLayer(), q, k, v)
    outs = [step(make_impl(use_irope=irope), *arguments, make_cache(metadata), metadata)[0] for irope in (True, False)]
    np.testing.assert_array_equal(*outs)


def test_prefills_and_decodes_have_schedules_of_their_own_that_follow_the_lengths(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    impl = make_impl(head_size=128)
    metadata = make_batch(7, config_of(attention_layers=(impl,), dtype="bfloat16"))
    schedules = [part.of(impl.spec(None)) for part in (metadata.prefill_schedules, metadata.decode_schedules)]
    assert [schedule.call.operation for schedule in schedules] == ["paged_extend", "paged_decode"]
    tokens = jnp.zeros(tokens_of(metadata), jnp.int32)
    rows = metadata.seq_lens_tensor.shape[0]
    after, _ = metadata.advance_step(v0.ModelInput(tokens, tokens), None, 16, rows, rows, True)
    assert after.prefill_schedules is None
    assert after.decode_schedules.of(impl.spec(None)).call.num_seqs == rows


def test_shared_cache_is_read_and_not_written():
    metadata = make_batch(7, config_of())
    q, k, v = q_k_v(tokens_of(metadata))
    impl = make_impl(kv_sharing_target_layer_name="layers.0")
    out, cache = step(impl, v0.AttentionLayer(), q, k, v, make_cache(metadata), metadata)
    np.testing.assert_array_equal(cache, make_cache(metadata))
    np.testing.assert_allclose(out, oracle(q, np.asarray(cache), metadata), **CLOSE)


CROSS = {"max_encoder_len": ENCODER_LONGEST, "num_encoder_tokens": 60}


def test_cross_attention_writes_the_encoders_keys_then_agrees_with_the_oracle():
    metadata = make_batch(11, config_of(**CROSS), encoder=True)
    assert metadata.is_all_encoder_attn_metadata_set
    assert metadata.is_all_cross_attn_metadata_set
    q, k, v = q_k_v(tokens_of(metadata), 60)
    expected = written(make_cache(metadata), metadata.cross_slot_mapping, k, v)
    impl, layer = make_impl(attn_type="encoder_decoder"), v0.AttentionLayer()
    out, cache = step(impl, layer, q, k, v, make_cache(metadata), metadata)
    np.testing.assert_array_equal(cache, expected)
    np.testing.assert_allclose(out, oracle(q, expected, metadata, cross=True, causal=False), **CLOSE)
    again, _ = step(impl, layer, q, None, None, cache, metadata)
    np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize(
    ("attn_type", "features"),
    [
        ("decoder", {"causal": True, "window_left": 4}),
        ("encoder_only", {"causal": False, "window_left": 4, "window_right": 4}),
        ("encoder", {"causal": False, "window_left": 4, "window_right": 4}),
    ],
)
def test_attention_without_a_cache_agrees_with_the_oracle(attn_type, features):
    cross = {"encoder_seq_len": 0}
    metadata = make_unpadded(config_of(num_prefills=None, num_prefill_tokens=None, max_encoder_len=24), **cross)
    lens, tokens = [5, 20], 25
    if attn_type == "encoder":
        lens, tokens = [7, 24], 31
        of_encoder = {"encoder_seq_lens_tensor": jnp.array(lens, jnp.int32), "num_encoder_tokens": tokens}
        starts = jnp.array([0, 7, 31], jnp.int32)
        metadata = dataclasses.replace(metadata, **of_encoder, encoder_seq_start_loc=starts)
    q, k, v = q_k_v(tokens)
    impl = make_impl(attn_type=attn_type, sliding_window=5)
    out, cache = step(impl, v0.AttentionLayer(), q, k, v, None, metadata)
    assert cache is None
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, sm_scale=0.25, **features)
    starts = np.array([0, lens[0], tokens])
    exact = reference.ragged_extend(*(np.asarray(x) for x in (q, k, v)), starts, starts, spec=spec)
    np.testing.assert_allclose(out, exact, **CLOSE)


def test_parts_of_a_batch_have_its_rows():
    metadata = make_batch(7, config_of())
    prefill, decode = metadata.prefill_metadata, metadata.decode_metadata
    assert (prefill.num_prefills, prefill.num_decode_tokens, decode.num_prefills) == (3, 0, 0)
    np.testing.assert_array_equal(prefill.seq_lens_tensor, metadata.seq_lens_tensor[:3])
    np.testing.assert_array_equal(decode.seq_lens, metadata.seq_lens[3:])
    np.testing.assert_array_equal(decode.query_start_loc, [0, 1, 2, 3])
    np.testing.assert_array_equal(decode.slot_mapping, metadata.slot_mapping[48:])
    held = dataclasses.replace(metadata, _cached_prefill_metadata=prefill, _cached_decode_metadata=decode)
    assert held.prefill_metadata is prefill
    assert held.decode_metadata is decode
    assert (prefill.decode_metadata, decode.prefill_metadata) == (None, None)


def test_advance_step_takes_the_sampled_tokens_to_the_next_slots():
    metadata = make_batch(4, config_of(), prefills=0, decodes=3, pad=1)
    before, table = np.asarray(metadata.seq_lens_tensor), np.asarray(metadata.block_tables)
    model_input = v0.ModelInput(jnp.zeros(4, jnp.int32), jnp.asarray(before - 1))
    advance = jax.jit(lambda m, x, tokens: m.advance_step(x, tokens, 16, 4, 3))
    after, model_input = advance(metadata, model_input, jnp.array([[11], [12], [13]], jnp.int32))
    assert after.seq_lens_tensor.tolist() == [*(before[:3] + 1), 0]
    assert model_input.input_tokens.tolist() == [11, 12, 13, 0]
    assert model_input.input_positions.tolist() == [*before[:3], -1]
    slots = [table[b, n // 16] * 16 + n % 16 for b, n in enumerate(before[:3])]
    assert after.slot_mapping.tolist() == [*slots, -1]
    assert (after.num_decode_tokens, after.max_decode_query_len) == (4, 1)


def test_advance_step_turns_prefills_into_decodes():
    metadata = make_unpadded(config_of(num_prefills=None, num_prefill_tokens=None))
    model_input = v0.ModelInput(jnp.zeros(25, jnp.int32), jnp.zeros(25, jnp.int32))
    with pytest.raises(ValueError, match=r"must be set for a batch with prefills. Got num_prefills=2"):
        metadata.advance_step(model_input, None, 16, 2, 2)
    with pytest.raises(ValueError, match="Got num_seqs=3"):
        metadata.advance_step(model_input, None, 16, 3, 2, True)
    after, model_input = metadata.advance_step(model_input, jnp.array([5, 6], jnp.int32), 16, 2, 2, True)
    assert (after.num_prefills, after.num_decode_tokens) == (0, 2)
    assert after.slot_mapping.tolist() == [3 * 16 + 5, 2 * 16 + 4]
    assert (model_input.input_tokens.tolist(), model_input.input_positions.tolist()) == ([5, 6], [5, 20])
