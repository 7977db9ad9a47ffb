"""What SGLang's backend alone serves agrees with the oracle: latent rows, extends of drafts, values of other widths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.backend import AttentionLayer, forward
from jattn.flash_attention import FlashAttentionBackend, FlashAttentionConfig
from jattn.forward_batch import ForwardMode
from jattn.kv_pool import KVPool
from jattn_kernels.spec import AttentionSpec
from tests.jattn.harness.sglang_requests import LAYER, MAX_CONTEXT, NOWHERE, Rows, normal, oracle, random_requests
from tests.often import slow

N, K, H, HV, NUM_DRAFT, CHUNK = 4, 2, 16, 8, 3, 64
LAYER_OF = AttentionLayer(
    layer_id=LAYER, tp_q_head_num=N, tp_k_head_num=K, tp_v_head_num=K, head_dim=H, v_head_dim=HV, scaling=0.25
)
SPEC = AttentionSpec(num_q_heads=N, num_kv_heads=K, head_dim=H, v_head_dim=HV, sm_scale=0.25)
MLA_SHAPE = {"tp_k_head_num": 1, "tp_v_head_num": 1, "head_dim": 24, "v_head_dim": 16}
MLA_SPEC = {"num_kv_heads": 1, "head_dim": 24, "v_head_dim": 16}
SCALES = {"k_scale": jnp.float32(0.05), "v_scale": jnp.array([0.02, 0.04], jnp.float32)}
# What the layer, the oracle's spec and the configuration have.
KINDS = {
    "chunks": ({"use_irope": True}, {"chunk_size": CHUNK}, {"attention_chunk_size": CHUNK}),
    "no_chunks_beside_chunks": ({}, {}, {"attention_chunk_size": CHUNK}),
    "mla": (MLA_SHAPE, MLA_SPEC, {"attention_arch": "MLA"}),
    "mla_fp8": (
        MLA_SHAPE | {"k_scale": jnp.float32(0.3)},
        MLA_SPEC,
        {"attention_arch": "MLA", "kv_cache_dtype": "fp8_e4m3"},
    ),
    "mla_chunks": (
        MLA_SHAPE | {"use_irope": True},
        MLA_SPEC | {"chunk_size": CHUNK},
        {"attention_arch": "MLA", "attention_chunk_size": CHUNK},
    ),
    "mla_disabled": (
        {"head_dim": 24, "v_head_dim": 16},
        {"head_dim": 24, "v_head_dim": 16},
        {"attention_arch": "MLA", "disable_mla": True},
    ),
    "mla_capped": (MLA_SHAPE | {"logit_cap": 2.0}, MLA_SPEC | {"logits_soft_cap": 2.0}, {"attention_arch": "MLA"}),
}
MODES = {
    "decode": (ForwardMode.DECODE, (1, 1, 0, 1)),
    "verify": (ForwardMode.TARGET_VERIFY, (NUM_DRAFT,) * 4),
    "extend": (ForwardMode.EXTEND, (40, 7, 0, 33)),
    "draft_extend": (ForwardMode.DRAFT_EXTEND, (2, 1, 0, 3)),
}


def make_backend(page_size, layer, **config):
    fields = {"max_context_len": MAX_CONTEXT, "page_size": page_size, "layers": (layer,), "implementation": "xla"}
    return FlashAttentionBackend(FlashAttentionConfig(speculative_num_draft_tokens=NUM_DRAFT, **(fields | config)))


def check(kind, mode_name, page_size, seed=0):
    of_layer, of_spec, of_config = KINDS[kind]
    layer = dataclasses.replace(LAYER_OF, **of_layer)
    spec = dataclasses.replace(SPEC, **of_spec)
    backend = make_backend(page_size, dataclasses.replace(layer, k_scale=None, v_scale=None), **of_config)
    requests, rng = random_requests(seed, page_size), np.random.default_rng(seed)
    mode, q_lens = MODES[mode_name]
    is_uniform = mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
    rows = Rows(requests, rng, layer, backend.config.stored_dtype, latent=backend.config.use_mla)
    ends = requests.seq_lens + (np.where(requests.seq_lens > 0, NUM_DRAFT, 0) if mode_name == "verify" else 0)
    own = [n if length else 0 for n, length in zip(q_lens, requests.seq_lens, strict=True)]
    rows.fill([requests.slots(row, 0, end - n) for row, (end, n) in enumerate(zip(ends, own, strict=True))])
    width = max(q_lens) if is_uniform else None
    slots = [
        requests.slots(row, end - n, end) if n or width is None else np.full(width, NOWHERE)
        for row, (end, n) in enumerate(zip(ends, own, strict=True))
    ]
    num_tokens = 4 * width if width else 96
    cu_q_lens = np.arange(5) * width if width else np.concatenate([[0], np.cumsum(own)])
    batch = requests.batch(mode, slots, num_tokens, cu_q_lens)
    k, v = rows.made(np.asarray(batch.out_cache_loc[0]))
    q = normal(rng, num_tokens, N, layer.head_dim)
    out, pool = jax.jit(step, static_argnums=0)(backend, q, k, v, layer, batch, rows.pool)
    expected = np.zeros(out.shape)
    for row, (end, n) in enumerate(zip(ends, own, strict=True)):
        at = slice(int(cu_q_lens[row]), int(cu_q_lens[row]) + n)
        if n:
            expected[at] = oracle(q[at], *rows.stored(requests.slots(row, 0, end)), spec)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    return pool


def step(backend, q, k, v, layer, batch, pool: KVPool):
    """A layer of a pass: metadata, write and attention."""
    return forward(backend, q, k, v, layer, batch, backend.init_forward_metadata(batch), pool)


@pytest.mark.parametrize(
    ("kind", "mode", "page_size"),
    [
        ("mla", "decode", 1),
        ("mla", "verify", 16),
        ("mla_fp8", "decode", 16),
        slow("mla", "extend", 64),
        ("mla", "draft_extend", 16),
        slow("mla_fp8", "verify", 1),
        ("mla_fp8", "extend", 16),
        ("mla_chunks", "extend", 16),
        ("mla_capped", "decode", 16),
        ("mla_disabled", "extend", 16),
        ("no_chunks_beside_chunks", "decode", 64),
        ("no_chunks_beside_chunks", "extend", 1),
        ("chunks", "draft_extend", 16),
    ],
)
def test_mode_of_a_kind_of_layer_agrees_with_the_oracle(kind, mode, page_size):
    check(kind, mode, page_size)


@pytest.mark.parametrize("latent", [False, True])
def test_queries_cast_to_the_pools_dtype_are_what_the_oracle_reads(latent):
    """Products of fp8 numbers are exact in bfloat16, so what is rounded is P, once, and the output, once."""
    requests, rng = random_requests(4, 16), np.random.default_rng(4)
    unscaled = dataclasses.replace(LAYER_OF, **(MLA_SHAPE if latent else {}))
    layer = dataclasses.replace(unscaled, k_scale=SCALES["k_scale"], v_scale=None if latent else SCALES["v_scale"])
    spec = dataclasses.replace(SPEC, **(MLA_SPEC if latent else {}))
    fields = {"kv_cache_dtype": "fp8_e4m3", "quantize_queries": True, "attention_arch": "MLA" if latent else "MHA"}
    backend = make_backend(16, unscaled, **fields)
    rows = Rows(requests, rng, layer, backend.config.stored_dtype, latent=latent)
    rows.fill([requests.slots(row, 0, length) for row, length in enumerate(requests.seq_lens)])
    q = normal(rng, 4, N, layer.head_dim).at[0, 0, 0].set(1e4)  # clipped, where a cast would give NaN
    batch = requests.batch(ForwardMode.DECODE, [], 4, np.arange(5))
    out, _ = jax.jit(step, static_argnums=0)(backend, q, None, None, layer, batch, rows.pool)
    assert out.dtype == q.dtype
    limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
    cast = np.clip(np.asarray(q), -limit, limit).astype(jnp.float8_e4m3fn)
    for row, length in enumerate(requests.seq_lens.tolist()):
        if length:
            k, v = rows.stored(requests.slots(row, 0, length))
            expected = oracle(cast[row : row + 1].astype(np.float64), k, v, spec)
            atol = 2 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(v).max()
            np.testing.assert_allclose(out[row : row + 1], expected, rtol=0, atol=atol)


def test_prompts_in_chunks_read_the_latent_rows_of_the_chunks_before():
    """As one pass over the whole of them would."""
    requests, rng = random_requests(7, 16), np.random.default_rng(7)
    layer, ends = dataclasses.replace(LAYER_OF, **MLA_SHAPE), requests.seq_lens.tolist()
    backend, run = make_backend(16, layer, attention_arch="MLA"), jax.jit(step, static_argnums=0)
    rows = Rows(requests, rng, layer, jnp.float32, latent=True)
    pool, begins, q = rows.pool, [0] * 4, [normal(rng, end, N, layer.head_dim) for end in ends]
    outs = [np.zeros((0, N, layer.v_head_dim), np.float32) for _ in ends]
    while begins != ends:
        stops = [min(begin + 31 + 13 * row, end) for row, (begin, end) in enumerate(zip(begins, ends, strict=True))]
        spans = list(zip(begins, stops, strict=True))
        bounds = np.cumsum([0, *(stop - begin for begin, stop in spans)])
        so_far = dataclasses.replace(requests, seq_lens=np.array(stops, np.int32))
        slots = [requests.slots(row, *span) for row, span in enumerate(spans)]
        batch = so_far.batch(ForwardMode.EXTEND, slots, 256, bounds)
        k, v = rows.made(np.asarray(batch.out_cache_loc[0]))
        own = [each[slice(*span)] for each, span in zip(q, spans, strict=True)]
        queries = jnp.concatenate([*own, jnp.zeros((256 - bounds[-1], N, layer.head_dim))])
        out, pool = run(backend, queries, k, v, layer, batch, pool)
        outs = [np.concatenate(pair) for pair in zip(outs, np.split(out, bounds[1:])[:4], strict=True)]
        begins = stops
    spec = dataclasses.replace(SPEC, **MLA_SPEC)
    for row, end in enumerate(ends):
        if end:
            expected = oracle(q[row], *rows.stored(requests.slots(row, 0, end)), spec)
            np.testing.assert_allclose(outs[row], expected, rtol=2e-5, atol=2e-5)


def test_queries_of_a_layer_without_a_scale_are_not_cast():
    requests, outs = random_requests(4, 16), []
    for quantize_queries in (True, False):
        backend = make_backend(16, LAYER_OF, kv_cache_dtype="fp8_e4m3", quantize_queries=quantize_queries)
        rows = Rows(requests, np.random.default_rng(5), LAYER_OF, backend.config.stored_dtype)
        rows.fill([requests.slots(row, 0, length) for row, length in enumerate(requests.seq_lens)])
        batch = requests.batch(ForwardMode.DECODE, [], 4, np.arange(5))
        q = normal(np.random.default_rng(6), 4, N, H)
        outs.append(jax.jit(step, static_argnums=0)(backend, q, None, None, LAYER_OF, batch, rows.pool)[0])
    np.testing.assert_array_equal(*outs)


def test_flat_rows_and_bare_slots_are_as_those_by_head_and_group():
    """As the engine hands them over."""
    requests, rng = random_requests(4, 16), np.random.default_rng(4)
    backend, rows = make_backend(16, LAYER_OF), Rows(requests, rng, LAYER_OF, jnp.float32)
    rows.fill([requests.slots(row, 0, length - 1) for row, length in enumerate(requests.seq_lens) if length])
    slots = [requests.slots(row, n - 1, n) if n else np.array([NOWHERE]) for row, n in enumerate(requests.seq_lens)]
    batch = requests.batch(ForwardMode.DECODE, slots, 4, np.arange(5))
    k, v = rows.made(np.asarray(batch.out_cache_loc[0]))
    q = normal(rng, 4, N, H)
    run = jax.jit(step, static_argnums=0)
    expected = run(backend, q, k, v, LAYER_OF, batch, rows.pool)
    bare = dataclasses.replace(batch, out_cache_loc=batch.out_cache_loc[0])
    out, pool = run(backend, *(x.reshape(4, -1) for x in (q, k, v)), LAYER_OF, bare, rows.pool)
    np.testing.assert_array_equal(out, expected[0].reshape(4, -1))
    np.testing.assert_array_equal(pool.groups[0].v, expected[1].groups[0].v)


def test_rotated_rows_are_scaled_into_an_fp8_pool():
    requests, rng = random_requests(6, 16), np.random.default_rng(6)
    layer = dataclasses.replace(LAYER_OF, v_head_dim=H, **SCALES)
    backend = make_backend(16, dataclasses.replace(LAYER_OF, v_head_dim=H), kv_cache_dtype="fp8_e4m3")
    rows = Rows(requests, rng, layer, backend.config.stored_dtype)
    slots = [requests.slots(row, n - 1, n) if n else np.array([NOWHERE]) for row, n in enumerate(requests.seq_lens)]
    batch = requests.batch(ForwardMode.DECODE, slots, 4, np.arange(5))
    metadata = jax.jit(backend.init_forward_metadata)(batch)
    k, v = rows.made(np.asarray(batch.out_cache_loc[0]))
    q = normal(rng, 4, N, H)
    straight = (jnp.ones((4, H // 2)), jnp.zeros((4, H // 2)))
    qkv = jnp.concatenate([q, k, v], axis=1)
    turned, pool = jax.jit(backend.save_rotated)(qkv, straight, layer, metadata, rows.pool)
    np.testing.assert_array_equal(turned, q)
    keys, values = pool.get_kv_buffer(LAYER)
    own = np.concatenate(slots)[[0, 1, 3]]
    for stored, scale, known in zip((keys, values), SCALES.values(), rows.stored(own), strict=True):
        np.testing.assert_allclose(stored[own].astype(jnp.float32) * scale.reshape(1, -1, 1), known, rtol=1e-6)
