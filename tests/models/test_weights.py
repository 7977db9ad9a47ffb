"""Checkpoints whose tensors do not fit the model: the sentence for each."""

import json
import pathlib
import shutil

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jattn.checkpoint import Checkpoint
from jattn.model import model_class

GOLDEN = pathlib.Path(__file__).parent / "golden"
DOWN = "model.layers.1.mlp.down_proj.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
BIAS = "model.layers.1.self_attn.k_proj.bias"
CORRECTION = "model.layers.2.mlp.gate.e_score_correction_bias"
GATE = "model.layers.2.mlp.shared_expert_gate.weight"
DRAFTING = "model.layers.3.eh_proj.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def load_model(folder, dtype=jnp.float32):
    checkpoint = Checkpoint(folder)
    return model_class(checkpoint.architecture).from_checkpoint(checkpoint, dtype=dtype)


@pytest.fixture
def load(tmp_path):
    """Loads a tiny model after its tensors were changed."""

    def with_changes(case="mha", dtype=jnp.float32, /, **changes):
        folder = shutil.copytree(GOLDEN / case, tmp_path / case, dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors") | changes
        save_file({name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors")
        return load_model(folder, dtype)

    return with_changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({DOWN: None}, rf"model\.safetensors must hold the tensor '{DOWN}', which is missing"),
        ({DOWN: np.zeros((48, 32), np.float32)}, rf"'{DOWN}' of .* must have shape \[32, 48\]. Got \[48, 32\]"),
        ({DOWN: np.zeros((32, 48), np.int8)}, rf"'{DOWN}' must be one of float32, bfloat16, float16. Got int8"),
        ({"extra": np.zeros(1, np.float32)}, "a place for. Got 1 others, such as 'extra'"),
        ({"lm_head.weight": None}, "must hold the tensor 'lm_head.weight'"),
    ],
)
def test_tensor_that_does_not_fit_is_named(load, changes, message):
    with pytest.raises(ValueError, match=message):
        load(**changes)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("num_hidden_layers", r"must hold the tensor 'model\.layers\.2\."),
        ("intermediate_size", r"'model\.layers\.0\.mlp\.[a-z_]*\.weight' of .* must have shape"),
    ],
)
def test_configuration_that_is_too_large_for_memory_is_held_against_the_tensors_first(tmp_path, field, message):
    folder = shutil.copytree(GOLDEN / "mha", tmp_path / "mha")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {field: 10**11}))
    with pytest.raises(ValueError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("case", "name"), [("mixtral", EXPERT), ("qwen2", BIAS), ("glm4_moe", CORRECTION), ("qwen2_moe", GATE)]
)
def test_tensor_that_only_this_architecture_has_is_missed(load, case, name):
    with pytest.raises(ValueError, match=rf"must hold the tensor '{name}', which is missing"):
        load(case, **{name: None})


def test_more_experts_than_there_are_tensors_are_noticed_before_memory_is_taken(tmp_path):
    folder = shutil.copytree(GOLDEN / "mixtral", tmp_path / "mixtral")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 10**11}))
    with pytest.raises(ValueError, match=r"must hold the tensor 'model\.layers\.0\.block_sparse_moe\.experts\.4\."):
        load_model(folder)


@pytest.mark.parametrize(("case", "name"), [("mha", FREQUENCIES), ("tied", "lm_head.weight")])
def test_tensor_that_is_not_needed_may_be_there(load, case, name):
    load(case, **{name: np.zeros(4, np.float32)})


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_layer_that_drafts_tokens_is_skipped_by_name_and_no_other(load, case):
    """Behind the last of three layers, with all that such a layer has and what only one that drafts has."""
    last, drafting, beyond = (f"model.layers.{number}." for number in (2, 3, 4))
    tensors = load_file(GOLDEN / case / "model.safetensors")
    more = {name.replace(last, drafting): x for name, x in tensors.items() if name.startswith(last)}
    own = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    more |= {f"{drafting}{name}.weight": np.zeros(4, np.float32) for name in own}
    assert len(more) > 30
    chex.assert_trees_all_equal(nnx.state(load(case, **more)), nnx.state(load(case)))
    with pytest.raises(ValueError, match=f"Got 1 others, such as '{beyond}eh_proj.weight'"):
        load(case, **{f"{beyond}eh_proj.weight": np.zeros(4, np.float32)})


def test_layer_behind_the_last_of_a_model_that_drafts_nothing_is_refused(load):
    with pytest.raises(ValueError, match=f"Got 1 others, such as '{DRAFTING}'"):
        load("deepseek_v2", **{DRAFTING: np.zeros(4, np.float32)})


def test_bias_for_the_choice_of_experts_stays_float32(load):
    bias = np.linspace(0, 1, 8, dtype=np.float32)
    stack = load("glm4_moe", jnp.bfloat16, **{CORRECTION: bias}).layers[1].mlp.router
    assert stack.kernel[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(stack.choice_bias[...][1], bias)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_weights_are_converted_to_the_models_dtype(load, stored):
    values = np.arange(32)
    model = load(**{"model.norm.weight": values.astype(stored)})
    scale = model.norm.scale[...]
    assert scale.dtype == jnp.float32
    np.testing.assert_array_equal(scale, values)
