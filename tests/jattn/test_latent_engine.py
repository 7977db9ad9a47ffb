"""A model whose layers read latent rows, absorbed MLA, served by the engine in all its ways: the oracle's tokens."""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jattn.backend import AttentionLayer, forward
from jattn.kv_pool import KVGroupSpec
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import SamplingParams
from jattn.serving.steps.drafting import NgramDrafting
from jattn_kernels import reference
from jattn_kernels.packed_latents import pack_latents
from jattn_kernels.reference.packed_rows import unpacked
from jattn_kernels.spec import AttentionSpec
from tests.jattn.harness.tiny import one_variant, run
from tests.often import slow

VOCAB, D, N, WIDTH, VALUES, LAYERS = 32, 16, 2, 12, 8, 2
SPEC = AttentionSpec(num_q_heads=N, num_kv_heads=1, head_dim=WIDTH, v_head_dim=VALUES, sm_scale=0.3)


class LatentModel(nnx.Module):
    """An embedding, two layers of attention alone, and a projection to logits."""

    vocab_size, context_len = VOCAB, 64
    kv_groups = (
        KVGroupSpec(name="latent", num_layers=LAYERS, num_kv_heads=1, head_dim=WIDTH, v_head_dim=VALUES, latent=True),
    )

    def __init__(self, k_scale=None):
        self.k_scale = None if k_scale is None else jnp.float32(k_scale)
        rng = np.random.default_rng(0)
        shapes = {"embedding": (VOCAB, D), "q": (LAYERS, D, N * WIDTH), "kv": (LAYERS, D, WIDTH)}
        shapes |= {"out": (LAYERS, N * VALUES, D), "head": (D, VOCAB)}
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)))

    @classmethod
    def from_checkpoint(cls, checkpoint, *, dtype, parallel=None):
        raise NotImplementedError

    def layer(self, number):
        return AttentionLayer(
            layer_id=number,
            tp_q_head_num=N,
            tp_k_head_num=1,
            tp_v_head_num=1,
            head_dim=WIDTH,
            v_head_dim=VALUES,
            scaling=0.3,
            k_scale=self.k_scale,
            kv="latent",
        )

    @property
    def attention_layers(self):
        return (self.layer(0),)

    def __call__(self, forward_batch, metadata, backend, pool):
        x = self.embedding[...][forward_batch.input_ids]
        for number in range(LAYERS):
            q = (x @ self.q[number]).reshape(-1, N, WIDTH)
            row = (x @ self.kv[number])[:, None]
            rest = (self.layer(number), forward_batch, metadata, pool)
            out, pool = forward(backend, q, row, row[..., :VALUES], *rest)
            x = x + out.reshape(len(x), -1) @ self.out[number]
        return x, pool

    def compute_logits(self, hidden):
        return hidden @ self.head[...]


def next_token(model, tokens, *, packed=False):
    x = np.asarray(model.embedding[...], np.float64)[tokens]
    bounds = np.array([0, len(x)])
    for number in range(LAYERS):
        q = (x @ np.asarray(model.q[number])).reshape(-1, N, WIDTH)
        row = (x @ np.asarray(model.kv[number]))[:, None]
        if packed:
            rows = np.zeros((64, WIDTH), np.float32)  # of one shape, however many there are: it is compiled
            rows[: len(row)] = row[:, 0]
            in_bytes = pack_latents(*jnp.split(jnp.asarray(rows), (VALUES,), axis=-1))
            row = unpacked(np.asarray(in_bytes)[: len(row)], VALUES)[:, None]
        if model.k_scale is not None:  # stored in fp8
            scale = np.asarray(model.k_scale)
            row = (row.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
        out = reference.ragged_extend(q, row, row[..., :VALUES], bounds, bounds, spec=SPEC)
        x = x + np.asarray(out).reshape(len(x), -1) @ np.asarray(model.out[number])
    return int(np.argmax(x[-1] @ np.asarray(model.head[...])))


NUM_TOKENS = 14
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)


def prompts():
    """Of two chunks, of less than a page, one that repeats itself, and one that begins as the first."""
    rng = np.random.default_rng(1)
    first, short, other = (rng.integers(0, VOCAB, length).tolist() for length in (21, 5, 9))
    return [first, short, [7, 3, 9, 11] * 5, other, [*first[:20], 1, 2]]


@functools.cache
def expected(k_scale=None, *, packed=False):
    """The oracle's tokens after each prompt."""
    model, continued = LatentModel(k_scale), prompts()
    for tokens in continued:
        for _ in range(NUM_TOKENS):
            tokens.append(next_token(model, tokens, packed=packed))
    return [tokens[-NUM_TOKENS:] for tokens in continued]


def served(k_scale=None, **fields):
    """The requests, served by an engine with room for hardly two of them, which is then asked again; and its plans."""
    sizes = {"num_pages": 18, "page_size": 4, "max_num_seqs": 3, "max_context_len": 64, "prefill_tokens": 16}
    config, plans = EngineConfig(full_sampling=False, **(sizes | fields)), []
    with one_variant("greedy"):
        engine = Engine(LatentModel(k_scale), config)
        submit = engine.executor.submit
        engine.executor.submit = lambda plan: plans.append(plan) or submit(plan)
        for _ in range(2):
            requests = [engine.make_request(prompt, GREEDY) for prompt in prompts()]
            assert run(engine, requests) == expected(k_scale, packed=config.kv_cache_dtype == "fp8_ds_mla")
    return requests, plans


def test_latent_rows_are_served_in_mixed_steps_with_preemption_and_prefix_cache():
    requests, plans = served(mixed_steps=True, prefill_seqs=2)
    assert any(plan.chunks and plan.decoding for plan in plans)
    assert any(request.num_preemptions for request in requests)
    assert requests[0].num_cached_tokens == 20


def test_latent_rows_are_served_through_sglangs_surface_with_pages_of_one_token():
    requests, _ = served(backend="flash_attention", page_size=1, num_pages=69)
    assert requests[0].num_cached_tokens


def test_latent_rows_are_served_with_drafted_tokens():
    """Several query tokens a sequence, causal among themselves; some are accepted, others are not."""
    requests, _ = served(speculative=NgramDrafting(num_draft_tokens=3), page_size=16, num_pages=8)
    drafts = [request.drafts for request in requests]
    assert 0 < sum(each.accepted for each in drafts) < sum(each.drafted for each in drafts)


@pytest.mark.parametrize(
    "fields",
    [
        {"mixed_steps": True, "prefill_seqs": 2},
        slow({"backend": "flash_attention", "page_size": 1, "num_pages": 69}),
        slow({"speculative": NgramDrafting(num_draft_tokens=3)}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_latent_rows_are_served_in_fp8_with_scales_of_tiles(fields):
    served(kv_cache_dtype="fp8_ds_mla", **fields)
    assert expected(packed=True) != expected()


def test_latent_rows_are_served_in_fp8_with_one_scale():
    served(k_scale=0.25, kv_cache_dtype="fp8")
    assert expected(0.25) != expected()
