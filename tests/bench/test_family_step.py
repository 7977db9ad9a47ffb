"""Steps of models with latent attention: the shapes are the models', the bytes those that a step reads."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from bench import family_step
from bench.decode_step import random_model
from bench.step_workload import DEEPSEEK_V2_LITE, DEEPSEEK_V3_4_LAYERS
from bench.workloads import random_normal
from jattn_models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM

TOY = DEEPSEEK_V2_LITE | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,  # as many as there are experts
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


def stacks(shapes, family):
    """Weights in each stack of layers, of one layer; and beside the layers."""
    config = family.config_class.from_dict(shapes)
    model = nnx.eval_shape(lambda: family(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))

    def count(module):
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(module)))

    of_layers = [count(stack) // len(layers) for stack, (layers, _) in zip(model.layers, config.stacks, strict=True)]
    return of_layers, count(model.vocabulary) + count(model.norm)


def test_shapes_are_those_of_the_models():
    """15.7 and 671 billion parameters."""
    (dense, sparse), rest = stacks(DEEPSEEK_V2_LITE, DeepseekV2ForCausalLM)
    assert dense + 26 * sparse + rest == pytest.approx(15.7e9, rel=1e-3)
    (dense, sparse), rest = stacks(DEEPSEEK_V3_4_LAYERS, DeepseekV3ForCausalLM)
    assert 3 * dense + 58 * sparse + rest == pytest.approx(671e9, rel=1e-3)


def test_step_reads_the_experts_that_tokens_go_to_and_all_else():
    model = random_model(TOY, DeepseekV2ForCausalLM)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights))
    experts = 2 * 8 * 3 * 32 * 16 * 2  # layers, experts, projections
    assert model.read_bytes(1) == total - 2 * 64 * 32 - experts + experts * 2 // 8


def test_command_prints_a_row_a_batch(monkeypatch, capsys):
    shapes = {"deepseek-v2-lite": family_step.Shapes("toy", TOY, DeepseekV2ForCausalLM)}
    monkeypatch.setattr(family_step, "SHAPES", shapes)
    family_step.main(["--batch", "1", "--ctx", "20", "--page", "8", "--steps", "4"])
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row.items() >= {"model": "toy, random bf16", "batch": 1, "ctx": 20, "page": 8, "impl": "jattn-xla"}.items()


@pytest.mark.slow
def test_latents_may_be_packed(monkeypatch, capsys):
    shapes = {
        "deepseek-v2-lite": family_step.Shapes(
            "toy", TOY | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, DeepseekV2ForCausalLM
        )
    }
    monkeypatch.setattr(family_step, "SHAPES", shapes)
    rows = {}
    for kv in ("bfloat16", "fp8_ds_mla"):
        family_step.main(["--kv", kv, "--batch", "2", "--ctx", "20", "--page", "8", "--steps", "4"])
        (rows[kv],) = map(json.loads, capsys.readouterr().out.splitlines())
    assert rows["fp8_ds_mla"]["kv"] == "fp8_ds_mla"
    assert rows["fp8_ds_mla"]["roofline_ms"] <= rows["bfloat16"]["roofline_ms"]


@pytest.mark.slow
def test_command_cuts_layers(monkeypatch, capsys):
    shapes = {"deepseek-v2-lite": family_step.Shapes("toy", TOY, DeepseekV2ForCausalLM)}
    monkeypatch.setattr(family_step, "SHAPES", shapes)
    made = []
    monkeypatch.setattr(
        family_step, "random_model", lambda *args, **options: made.append(random_model(*args, **options)) or made[0]
    )
    family_step.main(["--layers", "2", "--batch", "1", "--ctx", "20", "--page", "8", "--steps", "4"])
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["model"] == "toy cut to 2 layers, random bf16"
    assert made[0].config.num_layers == 2


def test_arrays_too_large_for_one_draw_are_made_in_parts(monkeypatch):
    plain = random_normal(jax.random.key(0), (2, 3, 8, 8), "bfloat16", 0.5)
    monkeypatch.setattr("bench.workloads._MOST_AT_ONCE", 100)
    random_normal.clear_cache()
    made = random_normal(jax.random.key(0), (2, 3, 8, 8), "bfloat16", 0.5)
    random_normal.clear_cache()
    assert made.shape == plain.shape
    assert not jnp.array_equal(made, plain)
    assert float(jnp.std(made.astype(jnp.float32))) == pytest.approx(0.5, rel=0.2)
