"""gpt-oss beside what all families are tested for: its configuration, its sinks, its experts' activation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.checkpoint import Checkpoint
from jattn.serving.steps.drafting import NgramDrafting
from jattn_models.experts import ClampedSwiGLU
from jattn_models.gpt_oss import GptOssConfig, GptOssForCausalLM
from jattn_models.layer_pattern import LayerKind, Segment
from jattn_models.rope_scaling import YarnScaling
from tests.models.harness.goldens import GOLDEN, TOLERANCE, dense_logits, golden
from tests.models.harness.served import assert_served_greedily
from tests.models.harness.smallest import SMALLEST
from tests.often import slow

# gpt-oss-20b's config.json, but for what it says of weights in few bits.
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


@pytest.mark.parametrize("config", [PUBLISHED, SMALLEST | {"num_hidden_layers": 24, "num_local_experts": 32}])
def test_published_and_absent_fields_say_the_same_of_layers_and_experts(config):
    read = GptOssConfig.from_dict(config)
    period = (LayerKind(window_left=127, sparse=True), LayerKind(sparse=True))
    assert read.segments == (Segment(range(24), period),)
    assert (read.qkv_bias, read.o_bias, read.sinks, read.tied) == (True, True, True, False)
    assert read.experts is not None
    assert read.experts.activation == ClampedSwiGLU(limit=7.0, alpha=1.702)
    assert (read.experts.biased, read.experts.router_biased) == (True, True)
    assert (read.experts.routing.num_experts, read.experts.routing.per_token) == (32, 4)
    scaling = read.rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_context_len, scaling.theta) == (32.0, 4096, 150000.0)
    assert not scaling.truncated
    assert read.rope.amplitude == pytest.approx(0.1 * np.log(32) + 1)


@pytest.mark.parametrize(
    ("activation", "sinks"),
    [
        slow(ClampedSwiGLU(limit=7.0, alpha=1.702), None),
        slow(ClampedSwiGLU(limit=1.0, alpha=1.0), None),
        (ClampedSwiGLU(limit=1.0, alpha=1.702), 0.0),
    ],
)
def test_golden_logits_need_the_activation_and_the_sinks(activation, sinks):
    model = GptOssForCausalLM.from_checkpoint(Checkpoint(GOLDEN / "gpt_oss"), dtype=jnp.float32)
    config = dataclasses.replace(model.config, experts=dataclasses.replace(model.config.experts, activation=activation))
    other = nnx.eval_shape(lambda: GptOssForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    other = nnx.merge(nnx.graphdef(other), nnx.state(model))
    for stack in other.layers:
        assert stack.attention.sinks.dtype == jnp.float32
        stack.attention.sinks[...] *= 1.0 if sinks is None else sinks
    logits = np.asarray(dense_logits(other, golden("gpt_oss", "tokens")[2]))
    assert np.abs(logits - golden("gpt_oss")[2]).max() > 100 * TOLERANCE


def test_drafted_tokens_are_verified_with_sinks_and_windows():
    """And again when the prompts' keys are in the pool."""
    requests = assert_served_greedily("gpt_oss", speculative=NgramDrafting(num_draft_tokens=3, min_ngram=1))
    assert all(request.num_cached_tokens for request in requests)
    assert sum(request.drafts.drafted for request in requests) > 0
