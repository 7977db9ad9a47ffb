"""Every mode of SGLang's backend agrees with the oracle on random requests, in every kind of layer that it serves."""

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
from tests.jattn.requests_of_tokens import LAYER, MAX_CONTEXT, NOWHERE, Rows, normal, oracle, random_requests

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
    "plain": ({}, {}, {}),
    "window": ({"sliding_window_size": 5}, {"window_left": 5}, {"sliding_window_size": 5}),
    "soft_cap": ({"logit_cap": 2.0}, {"logits_soft_cap": 2.0}, {}),
    "chunks": ({"use_irope": True}, {"chunk_size": CHUNK}, {"attention_chunk_size": CHUNK}),
    "no_chunks_beside_chunks": ({}, {}, {"attention_chunk_size": CHUNK}),
    "fp8": (SCALES, {}, {"kv_cache_dtype": "fp8_e4m3"}),
    "mla": (MLA_SHAPE, MLA_SPEC, {"attention_arch": "MLA"}),
}
MODES = {
    "decode": (ForwardMode.DECODE, (1, 1, 0, 1)),
    "verify": (ForwardMode.TARGET_VERIFY, (NUM_DRAFT,) * 4),
    "extend": (ForwardMode.EXTEND, (40, 7, 0, 33)),
    "draft_extend": (ForwardMode.DRAFT_EXTEND, (2, 1, 0, 3)),
    "mixed": (ForwardMode.MIXED, (31, 1, 0, 1)),
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


@pytest.mark.parametrize("mode", ["decode", "verify", "extend"])
@pytest.mark.parametrize("kind", KINDS)
def test_mode_of_each_kind_of_layer_agrees_with_the_oracle(kind, mode):
    page_size = (1, 16, 64)[(list(KINDS).index(kind) + list(MODES).index(mode)) % 3]
    check(kind, mode, page_size)


@pytest.mark.parametrize(("kind", "mode"), [("plain", "mixed"), ("chunks", "mixed"), ("chunks", "draft_extend")])
def test_other_extends_agree_with_the_oracle(kind, mode):
    check(kind, mode, 16)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_pages_of_every_size_agree_with_the_oracle(mode, page_size):
    check("window", mode, page_size, seed=7)
