"""Steps of gpt-oss's shapes: they are the model's, and a window's keys are all that its layers read."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from bench import family_step
from bench.decode_step import Model
from bench.step_workload import GPT_OSS_20B
from jattn_models.gpt_oss import GptOssForCausalLM

TOY = GPT_OSS_20B | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_local_experts": 8,
    "head_dim": 8,
    "sliding_window": 8,
}


def test_shapes_are_those_of_the_model():
    """20.9 billion parameters."""
    config = GptOssForCausalLM.config_class.from_dict(GPT_OSS_20B)
    model = nnx.eval_shape(lambda: GptOssForCausalLM(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model)))
    assert count == pytest.approx(20.9e9, rel=2e-3)


def test_a_window_is_read_and_no_more():
    unread: Any = None
    model = Model(GptOssForCausalLM.config_class.from_dict(TOY), unread, unread, unread, unread)
    assert model.seen_share(8) == 1
    assert model.seen_share(32) == (8 + 32) / 64


@pytest.mark.slow  # test_family_step has the command of other models
def test_command_prints_a_row_a_batch(monkeypatch, capsys):
    monkeypatch.setitem(family_step.SHAPES, "gpt-oss-20b", family_step.Shapes("toy", TOY, GptOssForCausalLM))
    family_step.main(["--shapes", "gpt-oss-20b", "--batch", "1", "--ctx", "20", "--page", "8", "--steps", "4"])
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row.items() >= {"batch": 1, "ctx": 20, "page": 8, "impl": "jattn-xla"}.items()
