"""A replayed step of pymllm's backend is like the captured one, updates the pool in place, and never compiles."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.spec_info import EagleVerifyInput
from tests.jattn.harness.compile_log import compilations
from tests.jattn.harness.pymllm_requests import (
    LAYER,
    NOWHERE,
    REQUESTS,
    TOLERANCE,
    WINDOW,
    WINDOWED,
    make_backend,
    make_batch,
    make_world,
    oracle,
    padded_to,
    random,
)
from tests.often import slow


def random_rows(rng, bs):
    rows = int(rng.integers(1, bs + 1))
    return padded_to(rng.permutation(REQUESTS)[:rows], rows, 0), padded_to(rng.integers(0, 90, rows), rows, 0)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window_size": WINDOW}, {"is_encoder_decoder": True}], ids=["one", "windows", "cross"]
)
def test_replay_has_the_tree_and_avals_of_the_capture(mode, options):
    backend, world, rng = make_backend(4, num_draft_tokens=3, **options), make_world(4), np.random.default_rng(0)
    rows = 3 if mode.is_target_verify() else 1
    replay = jax.jit(backend.init_forward_metadata_replay_cuda_graph, static_argnums=(0, 3, 4, 5))
    for bs in (1, 4):
        encoder = {"encoder_lens": jnp.zeros(bs, jnp.int32)} if options.get("is_encoder_decoder") else {}
        ones = jnp.ones(bs, jnp.int32)
        capture = functools.partial(backend.init_forward_metadata_capture_cuda_graph, bs, bs * rows, forward_mode=mode)
        captured = jax.eval_shape(capture, ones, ones, req_to_token=world.req_to_token, **encoder)
        for _ in range(4):
            requests, lens = random_rows(rng, bs)
            encoder = {name: jnp.zeros_like(lens) for name in encoder}
            metadata = replay(bs, requests, lens, None, mode, None, world.req_to_token, **encoder)
            chex.assert_trees_all_equal_structs(metadata, captured)
            chex.assert_trees_all_equal_shapes_and_dtypes(metadata, captured)


def test_replayed_decode_pads_with_rows_that_read_page_0():
    backend, world = make_backend(16), make_world(16)
    arguments = (jnp.array([3, 1], jnp.int32), jnp.array([20, 33], jnp.int32), 53, ForwardMode.DECODE, None)
    metadata = backend.init_forward_metadata_replay_cuda_graph(4, *arguments, world.req_to_token)
    (plan,) = metadata.decode_wrappers
    assert plan.seq_lens.tolist() == [20, 33, backend.get_cuda_graph_seq_len_fill_value(), 1]
    np.testing.assert_array_equal(plan.page_table[:2], world.page_table[[3, 1]])
    np.testing.assert_array_equal(plan.page_table[2:], 0)


def test_replayed_verify_adds_the_drafted_tokens_to_real_rows_only():
    backend, world = make_backend(16, num_draft_tokens=5), make_world(16)
    arguments = (jnp.array([3, 1], jnp.int32), jnp.array([20, 0], jnp.int32), 20, ForwardMode.TARGET_VERIFY, None)
    metadata = backend.init_forward_metadata_replay_cuda_graph(3, *arguments, world.req_to_token)
    (plan,) = metadata.prefill_wrappers
    assert plan.seq_lens.tolist() == [25, 0, 0]
    assert plan.cu_q_lens.tolist() == [0, 5, 10, 15]


def test_replay_reads_the_constructors_table_of_numpy_as_it_is_now():
    world = make_world(16)
    table = np.array(world.req_to_token)
    backend = make_backend(16, req_to_token=table)
    arguments = (jnp.array([3, 1], jnp.int32), jnp.array([20, 33], jnp.int32), 53, ForwardMode.DECODE, None)
    table[3], table[1] = table[1].copy(), table[3].copy()
    (plan,) = backend.init_forward_metadata_replay_cuda_graph(2, *arguments).decode_wrappers
    np.testing.assert_array_equal(plan.page_table, world.page_table[[1, 3]])
    with pytest.raises(ValueError, match="`req_to_token` must be given"):
        make_backend(16).init_forward_metadata_replay_cuda_graph(2, *arguments)


def test_replay_takes_the_encoders_lengths_and_the_mask_of_a_tree():
    world, int32 = make_world(16), functools.partial(jnp.array, dtype=jnp.int32)
    rows = (int32([3, 1]), int32([20, 33]), 53)
    backend = make_backend(16, is_encoder_decoder=True)
    replay = functools.partial(backend.init_forward_metadata_replay_cuda_graph, 3, *rows, ForwardMode.DECODE, None)
    own, encoder = replay(world.req_to_token, encoder_lens=int32([17, 5])).decode_wrappers
    assert encoder.seq_lens.tolist() == [17, 5, 0]
    np.testing.assert_array_equal(own.page_table[:2, :3], [world.page_table[3, 2:5], world.page_table[1, 1:4]])
    tree = EagleVerifyInput(custom_mask=jnp.ones(2 * 60, bool), positions=jnp.arange(4, dtype=jnp.int32))
    backend = make_backend(16, num_draft_tokens=2)
    replay = functools.partial(backend.init_forward_metadata_replay_cuda_graph, 2, *rows)
    (plan,) = replay(ForwardMode.TARGET_VERIFY, None, world.req_to_token, spec_info=tree).prefill_wrappers
    assert plan.custom_mask is tree.custom_mask
    assert plan.q_positions.tolist() == [0, 1, 2, 3]


def whole_step(backend, mode):
    """Metadata, write and attention of two layers, the pool donated."""
    forward = backend.forward_decode if mode.is_decode_or_idle() else backend.forward_extend

    def run(pool, q, k, v, slots, requests, lens, req_to_token):
        metadata = backend.init_forward_metadata_replay_cuda_graph(4, requests, lens, None, mode, None, req_to_token)
        tokens = jnp.zeros(q.shape[0], jnp.int32)
        starts = jnp.zeros(5, jnp.int32)
        batch = ForwardBatch(
            forward_mode=mode,
            input_ids=tokens,
            positions=tokens,
            seq_lens=lens,
            cu_q_lens=starts,
            out_cache_loc=(slots,),
        )
        out, pool = forward(q, k, v, dataclasses.replace(LAYER, layer_id=0), batch, metadata, pool)
        return forward(q + out, k + out[:, :2], v + out[:, :2], WINDOWED, batch, metadata, pool)

    return jax.jit(run, donate_argnums=0)


@pytest.mark.parametrize("mode", [slow(ForwardMode.DECODE), ForwardMode.TARGET_VERIFY])
def test_whole_step_replays_500_random_batches_without_compiling(mode):
    """The keys of requests are in the pool before their tokens, and the last batch's answers are the oracle's."""
    drafted = 3 if mode.is_target_verify() else 0
    q_len = max(1, drafted)
    backend, world = make_backend(4, sliding_window_size=WINDOW, num_draft_tokens=3), make_world(4)
    rng = np.random.default_rng(1)
    run, pool, k_pages = whole_step(backend, mode), world.pool, None
    batches = []
    for seed in range(500):
        rows = int(rng.integers(1, 5))
        requests, lens = rng.permutation(REQUESTS)[:rows].astype(np.int32), rng.integers(1, 90, rows).astype(np.int32)
        ends = lens + drafted
        slots = [world.slots(request, n - q_len, n) for request, n in zip(requests, ends, strict=True)]
        padding = (0, 4 - rows)
        arrays = (
            padded_to(np.concatenate(slots), 4 * q_len, NOWHERE),
            np.pad(requests, padding),
            np.pad(lens, padding),
        )
        tokens = (random(3 * seed + i, 4 * q_len, heads, 16) for i, heads in enumerate((4, 2, 2)))
        batches.append((*tokens, *map(jnp.asarray, arrays), world.req_to_token))
    out, pool = run(jax.tree.map(jnp.copy, pool), *batches[0])
    with compilations() as compiled:
        for batch in batches[1:]:
            k_pages = pool.groups[0].k
            out, pool = run(pool, *batch)
    assert not compiled
    assert k_pages.is_deleted()
    q, _, _, _, requests, lens, _ = batches[-1]
    rows = int((np.asarray(lens) > 0).sum())
    requests, lens, q_lens = requests[:rows].tolist(), lens[:rows].tolist(), (q_len,) * rows
    batch = make_batch(world, mode, requests, q_lens, lens)
    lengths = {"q_lens": q_lens, "kv_lens": lens, "requests": requests}
    pool = jax.tree.map(np.asarray, pool)
    middle = oracle(world, dataclasses.replace(LAYER, layer_id=0), batch, q, pool, **lengths)
    exact = oracle(world, WINDOWED, batch, np.asarray(q) + middle, pool, **lengths)
    np.testing.assert_allclose(out[: rows * q_len], exact[: rows * q_len], **TOLERANCE)
