"""A model whose layers read latent rows, absorbed MLA, served by the engine: the oracle's tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.backend import AttentionLayer, forward
from jattn.kv_pool import KVGroupSpec
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import SamplingParams
from jattn_kernels import reference
from jattn_kernels.spec import AttentionSpec
from tests.jattn.harness.tiny import one_variant, run

VOCAB, D, N, WIDTH, VALUES, LAYERS = 32, 16, 2, 12, 8, 2
SPEC = AttentionSpec(num_q_heads=N, num_kv_heads=1, head_dim=WIDTH, v_head_dim=VALUES, sm_scale=0.3)


class LatentModel(nnx.Module):
    """An embedding, two layers of attention alone, and a projection to logits."""

    vocab_size, context_len = VOCAB, 64
    kv_groups = (
        KVGroupSpec(name="latent", num_layers=LAYERS, num_kv_heads=1, head_dim=WIDTH, v_head_dim=VALUES, latent=True),
    )

    def __init__(self):
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


def next_token(model, tokens):
    x = np.asarray(model.embedding[...], np.float64)[tokens]
    bounds = np.array([0, len(x)])
    for number in range(LAYERS):
        q = (x @ np.asarray(model.q[number])).reshape(-1, N, WIDTH)
        row = (x @ np.asarray(model.kv[number]))[:, None]
        out = reference.ragged_extend(q, row, row[..., :VALUES], bounds, bounds, spec=SPEC)
        x = x + np.asarray(out).reshape(len(x), -1) @ np.asarray(model.out[number])
    return int(np.argmax(x[-1] @ np.asarray(model.head[...])))


@pytest.mark.parametrize("backend", ["paged", "flash_attention"])
def test_engine_serves_latent_rows_with_the_oracles_tokens(backend):
    """A prompt of two chunks beside a short one, and decodes of both; then again with keys in the pool."""
    sizes = {"num_pages": 17, "page_size": 4, "max_num_seqs": 2, "max_context_len": 64, "prefill_tokens": 16}
    config = EngineConfig(backend=backend, full_sampling=False, **sizes)
    model, rng = LatentModel(), np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (21, 5)]
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    with one_variant("greedy"):
        engine = Engine(model, config)
        found = run(engine, [engine.make_request(prompt, greedy) for prompt in prompts])
        again = [engine.make_request(prompt, greedy) for prompt in prompts]
        assert run(engine, again) == found
    assert [request.num_cached_tokens for request in again] == [20, 4]
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = list(prompt)
        for _ in range(6):
            expected.append(next_token(model, expected))
        assert tokens == expected[len(prompt) :]
