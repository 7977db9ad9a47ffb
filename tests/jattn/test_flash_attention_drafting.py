"""Drafting step by step, in chains and in trees, and the verification of trees, agree with the oracle."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.backend import AttentionLayer, forward
from jattn.flash_attention import (
    FlashAttentionBackend,
    FlashAttentionConfig,
    FlashAttentionMultiStepBackend,
    spec_of,
)
from jattn.forward_batch import ForwardMode
from jattn.spec_info import EagleDraftInput, EagleVerifyInput
from jattn_kernels.spec import AttentionSpec
from tests.jattn.harness.sglang_requests import LAYER, MAX_CONTEXT, NOWHERE, Rows, normal, oracle, random_requests
from tests.often import slow

N, K, H, STEPS, NUM_DRAFT = 4, 2, 16, 3, 5
SPEC = AttentionSpec(num_q_heads=N, num_kv_heads=K, head_dim=H, sm_scale=0.25)
PLAIN = AttentionLayer(
    layer_id=LAYER, tp_q_head_num=N, tp_k_head_num=K, tp_v_head_num=K, head_dim=H, v_head_dim=H, scaling=0.25
)
WINDOWED = dataclasses.replace(PLAIN, sliding_window_size=20)
LATENT = dataclasses.replace(PLAIN, tp_k_head_num=1, tp_v_head_num=1, head_dim=24, v_head_dim=H)


def make_config(page_size, layer=PLAIN, **fields):
    return FlashAttentionConfig(
        attention_arch="MLA" if layer is LATENT else "MHA",
        max_context_len=MAX_CONTEXT,
        page_size=page_size,
        layers=(layer,),
        implementation="xla",
        speculative_num_draft_tokens=NUM_DRAFT,
        **fields,
    )


@jax.jit(static_argnums=0)
def one_step(backend, q, k, v, batch, metadata, pool, layer=PLAIN):
    return forward(backend, q, k, v, layer, batch, metadata, pool)


def up_to_the_end(requests, longest):
    """The requests, the first of which is `longest` tokens long."""
    return dataclasses.replace(requests, seq_lens=np.array([longest, *requests.seq_lens[1:]], np.int32))


@pytest.mark.parametrize(
    ("layer", "topk", "page_size", "longest"),
    [
        (PLAIN, 1, 16, 100),
        slow(PLAIN, 2, 1, 100),
        slow(PLAIN, 2, 64, 100),
        (PLAIN, 2, 16, 191),
        slow(LATENT, 1, 16, 100),
        (LATENT, 2, 16, 100),
    ],
)
def test_each_step_sees_what_was_there_and_its_own_branch(layer, topk, page_size, longest):
    requests, rng = up_to_the_end(random_requests(topk, page_size), longest), np.random.default_rng(topk)
    backend = FlashAttentionMultiStepBackend(make_config(page_size, layer), topk, STEPS)
    rows, spec = Rows(requests, rng, layer, jnp.float32, latent=layer is LATENT), spec_of(layer)
    rows.fill([requests.slots(row, 0, length) for row, length in enumerate(requests.seq_lens)])
    drafted = [
        requests.slots(row, length, length + topk * STEPS) if length else np.full(topk * STEPS, NOWHERE)
        for row, length in enumerate(requests.seq_lens)
    ]
    tokens = 4 * topk
    batch = requests.batch(
        ForwardMode.DECODE, drafted, tokens * STEPS, np.arange(5) * topk, spec_info=EagleDraftInput()
    )
    all_metadata = jax.jit(backend.init_forward_metadata)(batch)
    assert len(all_metadata) == STEPS - 1
    pool = rows.pool
    for step, (of_step, metadata) in enumerate(zip(backend.attn_backends, all_metadata, strict=False)):
        slots = np.concatenate(drafted).reshape(tokens, STEPS)[:, step].astype(np.int32)
        assert metadata.slots[0].tolist() == slots.tolist()
        k, v = rows.made(slots)
        q = normal(rng, tokens, N, layer.head_dim)
        out, pool = one_step(of_step, q, k, v, batch, metadata, pool, layer)
        expected = np.zeros(out.shape)
        for row, length in enumerate(requests.seq_lens.tolist()):
            for branch in range(topk if length else 0):
                own = drafted[row][branch * STEPS : branch * STEPS + step + 1]
                seen = np.concatenate([requests.slots(row, 0, length), own])
                at = slice(row * topk + branch, row * topk + branch + 1)
                expected[at] = oracle(q[at], *rows.stored(seen), spec)
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_row_without_room_for_its_tree_is_refused_or_padding_where_lengths_are_not_known():
    requests = up_to_the_end(random_requests(0, 16), MAX_CONTEXT - 2 * STEPS + 1)
    requests = dataclasses.replace(requests, req_to_token=requests.req_to_token[:, :MAX_CONTEXT])
    backend = FlashAttentionMultiStepBackend(make_config(16), 2, STEPS).attn_backends[0]
    batch = requests.batch(ForwardMode.DECODE, [], 8, np.arange(5) * 2, spec_info=EagleDraftInput())
    with pytest.raises(ValueError, match="`req_to_token` must have room for the 6 keys of a drafted tree"):
        backend.init_forward_metadata(batch)
    lens = jax.jit(backend.init_forward_metadata)(batch).cache_seqlens_int32
    assert lens.tolist() == [0, *np.where(requests.seq_lens[1:] > 0, requests.seq_lens[1:] + 6, 0)]


PARENTS = np.array([-1, 0, 0, 1, 2])
DEPTHS = np.array([0, 1, 1, 2, 2])


def tree_mask(seq_lens):
    """What each token of the tree sees: all that was there, and its ancestors and itself."""
    ancestors = np.eye(NUM_DRAFT, dtype=bool)
    for token, parent in enumerate(PARENTS):
        if parent >= 0:
            ancestors[token] |= ancestors[parent]
    return [np.concatenate([np.ones((NUM_DRAFT, n), bool), ancestors], axis=1) for n in seq_lens if n]


@pytest.mark.parametrize(
    ("layer", "page_size", "longest"),
    [(PLAIN, 1, 100), (PLAIN, 16, 100), (PLAIN, 16, 190), (WINDOWED, 16, 100), (LATENT, 16, 100)],
    ids=["plain_page_1", "plain", "end_of_context", "window", "latent"],
)
def test_verified_tree_sees_its_ancestors(layer, page_size, longest):
    requests, rng = up_to_the_end(random_requests(9, page_size), longest), np.random.default_rng(9)
    backend = FlashAttentionBackend(make_config(page_size, layer))
    rows, spec = Rows(requests, rng, layer, jnp.float32, latent=layer is LATENT), spec_of(layer)
    lens = requests.seq_lens.tolist()
    rows.fill([requests.slots(row, 0, length) for row, length in enumerate(lens)])
    slots = [
        requests.slots(row, length, length + NUM_DRAFT) if length else np.full(NUM_DRAFT, NOWHERE)
        for row, length in enumerate(lens)
    ]
    masks = tree_mask(lens)
    flat = np.concatenate([mask.reshape(-1) for mask in masks] + [np.zeros(50, bool)])
    positions = (requests.seq_lens[:, None] + DEPTHS).reshape(-1).astype(np.int32)
    spec_info = EagleVerifyInput(custom_mask=jnp.asarray(flat), positions=jnp.asarray(positions))
    batch = requests.batch(
        ForwardMode.TARGET_VERIFY, slots, 4 * NUM_DRAFT, np.arange(5) * NUM_DRAFT, spec_info=spec_info
    )
    k, v = rows.made(np.asarray(batch.out_cache_loc[0]))
    q = normal(rng, 4 * NUM_DRAFT, N, layer.head_dim)
    metadata = jax.jit(backend.init_forward_metadata)(batch)
    out, _ = one_step(backend, q, k, v, batch, metadata, rows.pool, layer)
    expected, masks = np.zeros(out.shape), iter(masks)
    for row, length in enumerate(lens):
        at = slice(row * NUM_DRAFT, (row + 1) * NUM_DRAFT)
        if length:
            seen = rows.stored(requests.slots(row, 0, length + NUM_DRAFT))
            options = {"custom_mask": next(masks).reshape(-1), "q_positions": positions[at]}
            expected[at] = oracle(q[at], *seen, spec, **options)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_tokens_verified_past_the_context_read_nobodys_page():
    requests, rng = up_to_the_end(random_requests(9, 16), 190), np.random.default_rng(9)
    requests = dataclasses.replace(requests, req_to_token=requests.req_to_token[:, :MAX_CONTEXT])
    backend, rows = FlashAttentionBackend(make_config(16)), Rows(requests, rng, PLAIN, jnp.float32)
    rows.fill([requests.slots(row, 0, length) for row, length in enumerate(requests.seq_lens)])
    rows.pool = jax.tree.map(lambda pages: pages.at[:, 0].set(0), rows.pool)  # as the allocator keeps it
    slots = [np.pad(requests.slots(0, 190, 195), (0, 3), constant_values=NOWHERE)] + [np.full(NUM_DRAFT, NOWHERE)] * 3
    starts = np.arange(5) * NUM_DRAFT
    batch = requests.batch(ForwardMode.TARGET_VERIFY, slots, 4 * NUM_DRAFT, starts, spec_info=EagleVerifyInput())
    k, v = rows.made(np.asarray(batch.out_cache_loc[0]))
    q = normal(rng, 4 * NUM_DRAFT, N, H)
    out, _ = one_step(backend, q, k, v, batch, jax.jit(backend.init_forward_metadata)(batch), rows.pool)
    stored = (np.pad(x, ((0, 3), (0, 0), (0, 0))) for x in rows.stored(requests.slots(0, 0, 192)))
    np.testing.assert_allclose(out[:NUM_DRAFT], oracle(q[:NUM_DRAFT], *stored, SPEC), rtol=2e-5, atol=2e-5)


def test_mask_that_is_too_short_for_its_rows_is_refused():
    requests = random_requests(9, 16)
    bits = NUM_DRAFT * sum(n + NUM_DRAFT for n in requests.seq_lens.tolist() if n)
    for size, fits in ((bits, True), (bits - 1, False)):
        spec_info = EagleVerifyInput(custom_mask=jnp.zeros(size, bool))
        starts = np.arange(5) * NUM_DRAFT
        batch = requests.batch(ForwardMode.TARGET_VERIFY, [], 4 * NUM_DRAFT, starts, spec_info=spec_info)
        refused = contextlib.nullcontext() if fits else pytest.raises(ValueError, match="`custom_mask` of `spec_info`")
        with refused:
            FlashAttentionBackend(make_config(16)).init_forward_metadata(batch)


@pytest.mark.parametrize(
    ("fields", "config", "message"),
    [
        ({"use_irope": True}, {"attention_chunk_size": 64}, "Chunked layers do not serve drafted trees"),
        ({"chunk_size": 64}, {}, "Chunked layers do not serve drafted trees"),
        ({"sliding_window_size": STEPS - 1}, {}, "`sliding_window_size` must be at least 3, .* Got 2"),
    ],
)
def test_tree_in_a_layer_that_reads_positions_off_its_keys_is_refused(fields, config, message):
    requests = random_requests(0, 16)
    backend = FlashAttentionMultiStepBackend(make_config(16, **config), 2, STEPS).attn_backends[0]
    batch = requests.batch(ForwardMode.DECODE, [], 8, np.arange(5) * 2, spec_info=EagleDraftInput())
    metadata, rows = backend.init_forward_metadata(batch), Rows(requests, np.random.default_rng(0), PLAIN, jnp.float32)
    layer = dataclasses.replace(PLAIN, **fields)
    with pytest.raises(NotImplementedError, match=message):
        forward(backend, jnp.zeros((8, N, H)), None, None, layer, batch, metadata, rows.pool)


def test_drafting_of_what_is_no_draft_is_refused():
    requests = random_requests(0, 16)
    backend = FlashAttentionMultiStepBackend(make_config(16), 1, STEPS)
    batch = requests.batch(ForwardMode.DECODE, [], 4, np.arange(5))
    with pytest.raises(ValueError, match=r"`spec_info` must be an EagleDraftInput in drafting. Got NoneType"):
        backend.init_forward_metadata(batch)
    nobody = dataclasses.replace(batch, spec_info=EagleDraftInput(), req_pool_indices=None)
    with pytest.raises(ValueError, match="`forward_batch` must have `req_pool_indices`"):
        backend.init_forward_metadata_capture_cuda_graph(nobody)
    wrong = dataclasses.replace(batch, spec_info=EagleDraftInput(), out_cache_loc=(jnp.zeros(7, jnp.int32),))
    with pytest.raises(ValueError, match=r"a slot for each of 4 tokens, .* Got out_cache_loc.shape=\(7,\)"):
        backend.init_forward_metadata(wrong)


@pytest.mark.parametrize("name", ["topk", "speculative_num_steps"])
def test_drafting_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number of at least 1. Got 0"):
        FlashAttentionMultiStepBackend(
            **({"config": make_config(16), "topk": 1, "speculative_num_steps": 1} | {name: 0})
        )
