"""What pymllm's backend alone serves agrees with the oracle; and it refuses in a sentence what it cannot serve."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.backend import AttentionBackend
from jattn.flash_attention import CudaGraphState
from jattn.flashinfer import FlashInferAttnBackend, KVBuffers, WrapperDispatch, should_use_tensor_core
from jattn.forward_batch import ForwardMode
from jattn.spec_info import EagleVerifyInput
from tests.jattn.harness.pymllm_requests import (
    CONTEXT,
    CROSS,
    LAYER,
    NOWHERE,
    REQUESTS,
    TOLERANCE,
    WINDOW,
    WINDOWED,
    check,
    make_backend,
    make_batch,
    make_world,
    oracle,
    q_k_v,
    random,
    step,
    written,
)

DECODE = {"requests": (2, 0, 3), "q_lens": (1, 1, 1), "kv_lens": (1, 97, 20)}
EXTEND = {"requests": (2, 0, 3), "q_lens": (3, 1, 14), "kv_lens": (3, 97, 30)}
NEW = {"requests": (1, 3), "q_lens": (9, 2), "kv_lens": (9, 2)}
VERIFY = {"requests": (2, 0, 3), "q_lens": (3, 3, 3), "kv_lens": (1, 70, 18)}


def test_extend_without_prefix_needs_no_pages():
    check(make_backend(), make_world(1), LAYER, ForwardMode.EXTEND, **NEW, extend_no_prefix=True)


def test_extend_without_prefix_is_found_where_lengths_are_known():
    backend = make_backend()
    plain, continued = (
        make_batch(make_world(1), ForwardMode.EXTEND, (1, 3), (9, 2), lens) for lens in ((9, 2), (9, 5))
    )
    found = [backend.init_forward_metadata(batch).extend_no_prefix for batch in (plain, continued)]
    assert found == [True, False]
    assert not jax.jit(backend.init_forward_metadata)(plain).extend_no_prefix


def test_extend_without_prefix_is_refused_where_there_is_one():
    batch = make_batch(make_world(1), ForwardMode.EXTEND, (1, 3), (9, 2), (9, 5))
    with pytest.raises(ValueError, match=r"`extend_no_prefix` needs .* Got prefixes of \[0, 3, 0, 0\] tokens"):
        make_backend().init_forward_metadata(batch, extend_no_prefix=True)


@pytest.mark.parametrize(
    ("mode", "lengths"),
    [(ForwardMode.DECODE, DECODE), (ForwardMode.EXTEND, EXTEND), (ForwardMode.TARGET_VERIFY, VERIFY)],
    ids=["decode", "extend", "verify"],
)
def test_second_wrapper_serves_layers_without_a_window(mode, lengths):
    backend = make_backend(4, sliding_window_size=WINDOW)
    assert backend.dispatch_reason is WrapperDispatch.SLIDING_WINDOW
    check(backend, make_world(4), LAYER, mode, **lengths)


def test_single_wrapper_serves_a_layer_with_a_window():
    check(make_backend(4), make_world(4), WINDOWED, ForwardMode.MIXED, **EXTEND)


@pytest.mark.parametrize("layer", [CROSS, LAYER], ids=["cross", "own"])
@pytest.mark.parametrize(
    ("mode", "lengths"), [(ForwardMode.DECODE, DECODE), (ForwardMode.EXTEND, EXTEND)], ids=["decode", "extend"]
)
def test_cross_attention_sees_each_requests_encoder(mode, lengths, layer):
    backend = make_backend(4, is_encoder_decoder=True)
    assert backend.dispatch_reason is WrapperDispatch.CROSS_ATTENTION
    check(backend, make_world(4), layer, mode, **lengths, encoder_lens=(7, 0, 12))


def test_cross_attention_saves_the_encoders_keys():
    backend, world = make_backend(4, is_encoder_decoder=True), make_world(4)
    slots = world.slots(2, 0, 5)
    batch = make_batch(world, ForwardMode.EXTEND, (2,), (3,), (3,), encoder_lens=(5,))
    batch = dataclasses.replace(batch, encoder_out_cache_loc=jnp.asarray(slots, jnp.int32))
    q, k, v = random(1, 24, 4, 16), random(2, 5, 2, 16), random(3, 5, 2, 16)
    out, pool = step(backend, (), CROSS, batch, q, k, v, jax.tree.map(jnp.copy, world.pool))
    expected = written(world, CROSS, slots, k, v)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, pool), expected)
    lengths = {"q_lens": (3,), "kv_lens": (3,), "requests": (2,), "encoder_lens": (5,)}
    np.testing.assert_allclose(out[:3], oracle(world, CROSS, batch, q, expected, **lengths)[:3], **TOLERANCE)


def test_verify_of_trees_takes_their_mask_and_positions():
    world, backend = make_world(4), make_backend(4, sliding_window_size=WINDOW)
    requests, kv_lens = (2, 0, 3), (1, 70, 18)
    within = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)  # a root and two children
    mask = np.concatenate([np.concatenate([np.ones((3, n), bool), within], axis=1).reshape(-1) for n in kv_lens])
    positions = np.concatenate([n + np.array([0, 1, 1]) for n in (*kv_lens, 0)]).astype(np.int32)
    info = EagleVerifyInput(
        custom_mask=jnp.asarray(np.append(mask, np.zeros(50, bool))), positions=jnp.asarray(positions)
    )
    batch = make_batch(world, ForwardMode.TARGET_VERIFY, requests, (3, 3, 3), kv_lens, spec_info=info)
    q, k, v = q_k_v(batch)
    out, _ = step(backend, (), WINDOWED, batch, q, k, v, jax.tree.map(jnp.copy, world.pool))
    expected = written(world, WINDOWED, batch.out_cache_loc[0], k, v)
    lengths = {"q_lens": (3, 3, 3), "kv_lens": kv_lens, "requests": requests}
    tree = {"custom_mask": mask, "q_positions": positions[:9]}
    exact = oracle(world, WINDOWED, batch, q, expected, **lengths, **tree)
    np.testing.assert_allclose(out[:9], exact[:9], **TOLERANCE)
    np.testing.assert_array_equal(out[9:], 0)


def test_batches_with_page_tables_need_no_token_slots():
    world, backend = make_world(16), make_backend(16)
    batch = make_batch(world, ForwardMode.DECODE, (2, 0, 3), (1, 1, 1), (5, 9, 20))
    tables = (jnp.asarray(np.concatenate([world.page_table[[2, 0, 3]], np.zeros((1, 8), np.int32)])),)
    given = dataclasses.replace(batch, page_tables=tables, req_pool_indices=None, req_to_token_pool=None)
    q, k, v = q_k_v(batch)
    results = [step(backend, (), LAYER, each, q, k, v, jax.tree.map(jnp.copy, world.pool)) for each in (batch, given)]
    chex.assert_trees_all_equal(*results)


@pytest.mark.parametrize(("page_size", "layout"), [(1, "NHD"), (4, "HND")])
def test_buffers_are_read_and_written_by_slot(page_size, layout):
    world = make_world(page_size, layout)
    buffers = KVBuffers(world.pool, v_scale=jnp.float32(2.0))
    k, v = random(1, 3, 2, 16), random(2, 3, 2, 16)
    slots = jnp.array([9, NOWHERE, 2], jnp.int32)
    before = buffers.get_kv_buffer(1)
    after = jax.jit(KVBuffers.set_kv_buffer)(buffers, 1, slots, k, v).get_kv_buffer(1)
    for old, new, rows in zip(before, after, (k, v / 2), strict=True):
        chex.assert_shape(new, (world.pool.groups[0].num_slots, 2, 16))
        np.testing.assert_array_equal(new, old.at[jnp.array([9, 2])].set(rows[jnp.array([0, 2])]))


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "wanted"),
    [("float8_e4m3fn", 2, 2, True), ("float8_e5m2", 8, 8, True), ("bfloat16", 8, 2, True), ("float16", 6, 2, False),
     ("float16", 8, 2, True), ("float32", 8, 1, False), ("bfloat16", 2, 2, False)],
)  # fmt: skip
def test_tensor_cores_are_for_fp8_and_for_groups_of_four(dtype, heads, kv_heads, wanted):
    assert should_use_tensor_core(dtype, heads, kv_heads) is wanted
    backend = FlashInferAttnBackend(heads, kv_heads, 16, dtype, "bfloat16", 8, (1, 8), None, 1)
    assert backend.decode_use_tensor_cores is wanted


def test_backend_is_static_and_keeps_shapes_of_arrays():
    given = FlashInferAttnBackend(
        4, 2, 16, jnp.float32, jnp.float32, CONTEXT, np.zeros((REQUESTS, CONTEXT), np.int32), None, 8,
        kv_indptr_buf=jnp.zeros(6, jnp.int32), kv_last_page_len_buf=jax.ShapeDtypeStruct((7,), jnp.int32),
    )  # fmt: skip
    assert given.req_to_token == (REQUESTS, CONTEXT)
    assert given.max_bs == 5
    assert isinstance(given, AttentionBackend)
    assert hash(make_backend()) == hash(make_backend())
    assert given.init_cuda_graph_state(5, 9) == CudaGraphState(max_bs=5, max_num_tokens=9, max_pages=CONTEXT)


def capture(backend, bs=2, num_tokens=2, mode=ForwardMode.DECODE, width=CONTEXT, **options):
    ones = jnp.ones(bs, jnp.int32)
    table = jnp.zeros((REQUESTS, width), jnp.int32)
    return backend.init_forward_metadata_capture_cuda_graph(bs, num_tokens, ones, ones, mode, table, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_backend(0), "`page_size` must be a whole number of at least 1. Got 0"),
        (lambda: make_backend(num_heads=3), "must be a multiple of `num_kv_heads`"),
        (lambda: make_backend(req_to_token=(1, 8)), "at least `max_context_len`=128"),
        (lambda: make_backend(sliding_window_size=3, is_encoder_decoder=True), "`sliding_window_size` must be None"),
        (lambda: make_backend(sliding_window_size=-5), "`sliding_window_size` must be None or a whole number"),
        (lambda: make_backend(num_draft_tokens=0), "`num_draft_tokens` must be None or a whole number of at least 1"),
        (lambda: make_backend(sliding_window_size=3, kv_indptr_buf=(9,)), "must be None where there are two wrappers"),
        (lambda: make_backend().init_cuda_graph_state(9, 9), r"`max_bs` must be in 1 .. 8 .* Got max_bs=9"),
        (lambda: make_backend().init_cuda_graph_state(2, 1), "Got max_bs=2, max_num_tokens=1"),
        (lambda: make_backend().init_cuda_graph_state(2, 2, jnp.zeros(9)), "`kv_indices_buf` must have .* = 256"),
        (lambda: capture(make_backend(), num_tokens=3), "`num_tokens` must be 1 for each of bs=2 rows"),
        (lambda: capture(make_backend(), 9, 9), r"`bs` must be in 1 .. 8. Got bs=9"),
        (lambda: capture(make_backend(), mode=ForwardMode.EXTEND), "must be DECODE, IDLE or TARGET_VERIFY"),
        (lambda: capture(make_backend(), mode=ForwardMode.TARGET_VERIFY), "`num_draft_tokens` must be given"),
        (lambda: capture(make_backend(), width=9), r"Got req_to_token.shape=\(4, 9\)"),
        (lambda: capture(make_backend(is_encoder_decoder=True)), "`encoder_lens` must be given"),
        (lambda: capture(make_backend(skip_prefill=True, num_draft_tokens=1), mode=ForwardMode.TARGET_VERIFY),
         "`skip_prefill` backends do decode only"),
    ],
)  # fmt: skip
def test_backend_refuses_what_cannot_be(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("layer", "given", "message"),
    [
        (dataclasses.replace(LAYER, sliding_window_size=3), "kv", "must have the backend's window of 9 or none"),
        (CROSS, "kv", "may have cross attention only with `is_encoder_decoder`"),
        (LAYER, "k", "`k` and `v` must be given together or both be None"),
        (LAYER, "", "`k` and `v` must be given with `use_ragged`"),
    ],
)
def test_layers_and_keys_that_contradict_the_metadata_are_refused(layer, given, message):
    backend, world = make_backend(sliding_window_size=WINDOW), make_world(1)
    batch = make_batch(world, ForwardMode.EXTEND, (1,), (3,), (5,), encoder_out_cache_loc=jnp.zeros(24, jnp.int32))
    q, k, v = q_k_v(batch)
    k, v = (x if name in given else None for name, x in (("k", k), ("v", v)))
    with pytest.raises(ValueError, match=message):
        backend.forward_extend(q, k, v, layer, batch, backend.init_forward_metadata(batch), world.pool)


def test_backend_says_what_a_batch_lacks():
    world = make_world(1)
    batch = make_batch(world, ForwardMode.DECODE, (1,), (1,), (5,))
    with pytest.raises(ValueError, match="`forward_batch` must have `page_tables`, or `req_pool_indices`"):
        make_backend().init_forward_metadata(dataclasses.replace(batch, req_to_token_pool=None))
    encoders = make_backend(is_encoder_decoder=True)
    with pytest.raises(ValueError, match="`encoder_lens` must be given"):
        encoders.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="`encoder_page_table` and `encoder_lens` must be given beside `page_tables`"):
        encoders.init_forward_metadata(dataclasses.replace(batch, page_tables=(world.req_to_token,)))
