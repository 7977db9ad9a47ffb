"""Layers of cross attention read their encoder's keys, and the others the decoder's that follow on a new page."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.backend import AttentionLayer, forward
from jattn.flash_attention import FlashAttentionBackend, FlashAttentionConfig
from jattn.forward_batch import ForwardMode
from jattn_kernels.spec import AttentionSpec
from tests.jattn.harness.sglang_requests import LAYER, MAX_CONTEXT, NOWHERE, Rows, normal, oracle, random_requests
from tests.often import often_together

N, K, H = 4, 2, 16
SPEC = AttentionSpec(num_q_heads=N, num_kv_heads=K, head_dim=H, sm_scale=0.25)
SELF = AttentionLayer(
    layer_id=LAYER, tp_q_head_num=N, tp_k_head_num=K, tp_v_head_num=K, head_dim=H, v_head_dim=H, scaling=0.25
)
CROSS = dataclasses.replace(SELF, is_cross_attention=True)


def make_backend(page_size):
    return FlashAttentionBackend(
        FlashAttentionConfig(
            max_context_len=MAX_CONTEXT,
            page_size=page_size,
            layers=(SELF, CROSS),
            is_encoder_decoder=True,
            implementation="xla",
        )
    )


@jax.jit
def nothing_but_metadata(forward_batch):
    return make_backend(16).init_forward_metadata(forward_batch)


@pytest.mark.parametrize(
    ("mode", "page_size"),
    often_together(
        itertools.product((ForwardMode.DECODE, ForwardMode.EXTEND), (1, 16, 64)),
        [(ForwardMode.DECODE, 16), (ForwardMode.EXTEND, 1), (ForwardMode.EXTEND, 64)],
    ),
)
def test_encoders_and_decoders_keys_agree_with_the_oracle(mode, page_size):
    requests, rng = random_requests(3, page_size, encoder=True), np.random.default_rng(3)
    backend, rows = make_backend(page_size), Rows(requests, rng, SELF, jnp.float32)
    decode = mode is ForwardMode.DECODE
    own = (1, 1, 0, 1) if decode else (20, 3, 0, 17)
    ends, encoders = requests.seq_lens, [requests.encoder_slots(row) for row in range(4)]
    keys = [requests.slots(row, 0, end - n) for row, (end, n) in enumerate(zip(ends, own, strict=True))]
    rows.fill(keys + encoders if decode else keys)
    slots = [requests.slots(row, end - n, end) for row, (end, n) in enumerate(zip(ends, own, strict=True))]
    cu_q_lens, num_tokens = np.concatenate([[0], np.cumsum(own)]), 64
    encoder_out = np.concatenate([*encoders, np.full(256, NOWHERE)])[:256].astype(np.int32)
    if decode:
        slots[2], cu_q_lens, num_tokens = np.array([NOWHERE]), np.arange(5), 4
    given = None if decode else jnp.asarray(encoder_out)
    batch = requests.batch(mode, slots, num_tokens, cu_q_lens, encoder_out_cache_loc=given)
    new = rows.made(np.asarray(batch.out_cache_loc[0]))
    encoded = (None, None) if decode else rows.made(encoder_out)
    q = normal(rng, num_tokens, N, H)

    @jax.jit
    def step(q, new, encoded, batch, pool):
        metadata = backend.init_forward_metadata(batch)
        out, pool = forward(backend, q, *new, SELF, batch, metadata, pool)
        crossed, pool = forward(backend, q, *encoded, CROSS, batch, metadata, pool)
        return out, crossed, pool

    out, crossed, _ = step(q, new, encoded, batch, rows.pool)
    expected, expected_crossed = np.zeros(out.shape), np.zeros(out.shape)
    for row in range(4) if decode else np.flatnonzero(own):
        at = slice(int(cu_q_lens[row]), int(cu_q_lens[row + 1]))
        if ends[row]:
            expected[at] = oracle(q[at], *rows.stored(requests.slots(row, 0, ends[row])), SPEC)
        # A padded row of decode has a query, and this test gives it an encoder.
        over_all = dataclasses.replace(SPEC, causal=False)
        expected_crossed[at] = oracle(q[at], *rows.stored(encoders[row]), over_all)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(crossed, expected_crossed, rtol=2e-5, atol=2e-5)


def test_metadata_has_the_encoders_lengths_and_pages():
    requests = random_requests(5, 16, encoder=True)
    batch = requests.batch(ForwardMode.DECODE, [], 4, np.arange(5))
    metadata = nothing_but_metadata(batch)
    lens = requests.encoder_lens
    assert metadata.encoder_lens_int32.tolist() == lens.tolist()
    assert metadata.encoder_cu_seqlens_k.tolist() == [0, *np.cumsum(lens).tolist()]
    for row in range(4):
        pages = requests.encoder_slots(row)[::16] // 16
        assert metadata.encoder_page_table[row, : len(pages)].tolist() == pages.tolist()
        own = requests.slots(row, 0, requests.seq_lens[row])[::16] // 16
        assert metadata.page_table[row, : len(own)].tolist() == own.tolist()


def test_cross_attention_without_an_encoder_is_refused():
    requests = random_requests(5, 16)
    batch = requests.batch(ForwardMode.DECODE, [], 4, np.arange(5))
    backend, rows = make_backend(16), Rows(requests, np.random.default_rng(0), SELF, jnp.float32)
    metadata = backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match=r"`is_cross_attention` needs a batch with `encoder_lens`"):
        forward(backend, jnp.zeros((4, N, H)), None, None, CROSS, batch, metadata, rows.pool)


def test_encoder_keys_without_places_are_refused():
    requests = random_requests(5, 16, encoder=True)
    batch = requests.batch(ForwardMode.DECODE, [], 4, np.arange(5))
    backend, rows = make_backend(16), Rows(requests, np.random.default_rng(0), SELF, jnp.float32)
    metadata, keys = backend.init_forward_metadata(batch), jnp.zeros((9, K, H))
    with pytest.raises(ValueError, match="`encoder_out_cache_loc` must be given"):
        forward(backend, jnp.zeros((4, N, H)), keys, keys, CROSS, batch, metadata, rows.pool)


def test_window_beside_an_encoder_is_refused():
    with pytest.raises(ValueError, match="`sliding_window_size` must be None in an encoder-decoder model"):
        FlashAttentionConfig(max_context_len=8, page_size=4, is_encoder_decoder=True, sliding_window_size=3)
    windowed, backend = dataclasses.replace(CROSS, sliding_window_size=3), make_backend(16)
    requests = random_requests(5, 16, encoder=True)
    batch = requests.batch(ForwardMode.DECODE, [], 4, np.arange(5))
    rows = Rows(requests, np.random.default_rng(0), SELF, jnp.float32)
    metadata = backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match=r"`sliding_window_size` must be -1 in cross attention. Got 3"):
        forward(backend, jnp.zeros((4, N, H)), None, None, windowed, batch, metadata, rows.pool)
