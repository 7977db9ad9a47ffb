"""Checkpoints in fp8 with a scale for each output or tensor: held as stored, whoever wrote them, or refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.checkpoint import Checkpoint
from jattn.model import load_model, model_class, model_without_weights
from jattn.parallel import ONE_DEVICE, Parallel
from jattn_models.quantization import BlockScales, ChannelScales
from jattn_models.quantization_config import read_quantization
from tests.models.harness.goldens import GOLDEN
from tests.models.harness.in_fp8 import KINDS, MODELOPT, TRANSFORMERS, compressed_tensors, copies, is_projection
from tests.often import slow

TENSOR = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def leaves(checkpoint, *, parallel=ONE_DEVICE, rank=0):
    """A model's leaves, kernels in fp8 as what they stand for; and how many of those there are."""
    of = model_class(checkpoint.architecture)
    model = of.from_checkpoint(checkpoint, dtype=jnp.float32, parallel=parallel, rank=rank)
    found = {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(nnx.state(model))}
    scaled = [path for path in found if path[-1] == "scales"]
    for path in scaled:
        kernel = (*path[:-1], "kernel")
        assert found[kernel].dtype == jnp.float8_e4m3fn
        assert found[path].shape == (*found[kernel].shape[:-1], 1)
        found[kernel] = np.swapaxes(found[kernel].astype(np.float32) * found.pop(path), -1, -2)
    return found, len(scaled)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert found[path].dtype == leaf.dtype, path
        np.testing.assert_array_equal(found[path], leaf, err_msg=str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_every_writers_weights_are_held_as_they_are_stored(tmp_path, kind):
    in_fp8, in_float32 = copies(GOLDEN / "gqa", tmp_path, kind)
    found, in_few_bits = leaves(in_fp8)
    assert in_few_bits == 4
    assert_same(found, leaves(in_float32)[0])


# Parts of heads beside experts, none of which is held so on a CPU, shared ones included; fused tensors, heads that turn
# in neighbours with biases, a gate beside experts.
@pytest.mark.parametrize(
    ("case", "kind", "in_few_bits", "rank"),
    [
        ("deepseek_v3", "compressed_channel", 8, 1),
        slow("phi3", "transformers", 4, 0),
        ("glm4", "modelopt", 4, 0),
        ("glm4", "modelopt", 4, 1),
    ],
)
def test_share_in_fp8_is_that_of_what_it_stands_for(tmp_path, case, kind, in_few_bits, rank):
    in_fp8, in_float32 = copies(GOLDEN / case, tmp_path, kind)
    share = {"parallel": Parallel("tensor", 2), "rank": rank}
    found, count = leaves(in_fp8, **share)
    assert count == in_few_bits
    assert_same(found, leaves(in_float32, **share)[0])


def test_projections_that_are_not_all_stored_alike_are_held_as_what_they_stand_for(tmp_path):
    """As where the first layer is left out: one of two, and keys in the other."""

    def chosen(name, tensor):
        return is_projection(name, tensor) and "layers.0.mlp" not in name and "layers.1.self_attn.k" not in name

    in_fp8, in_float32 = copies(GOLDEN / "gqa", tmp_path, chosen=chosen)
    found, in_few_bits = leaves(in_fp8)
    assert in_few_bits == 1
    assert_same(found, leaves(in_float32)[0])


def test_projection_to_logits_may_be_in_fp8(tmp_path):
    in_fp8, in_float32 = copies(GOLDEN / "gqa", tmp_path, chosen=lambda name, tensor: name == "lm_head.weight")
    found, in_few_bits = leaves(in_fp8)
    assert in_few_bits == 1
    assert_same(found, leaves(in_float32)[0])


STATIC = [
    (TRANSFORMERS | {"activation_scheme": "static"}, "activation_scheme='static'"),
    (MODELOPT, "quant_algo='FP8' .static scales of activations..$"),
    (MODELOPT | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme={'num_bits': 8}.$"),
    (compressed_tensors("tensor", tokens=TENSOR), "input_activations.strategy='tensor' and .*dynamic=False"),
    (compressed_tensors(tokens=None), "input_activations=None"),
    (compressed_tensors(kv_cache_scheme=TENSOR), "kv_cache_scheme={'num_bits': 8"),
]


@pytest.mark.parametrize(("announced", "got"), STATIC)
def test_what_is_not_done_beside_weights_must_be_asked_for(tmp_path, announced, got):
    more = {"input_scale": np.ones((), np.float32), "k_scale": np.ones((), np.float32)}
    in_fp8, in_float32 = copies(GOLDEN / "gqa", tmp_path, "compressed_tensor", announced=announced, more=more)
    with pytest.raises(NotImplementedError, match=rf"`quantization` be 'fp8' to take the weights alone.* Got .*{got}"):
        model_without_weights(in_fp8, dtype=jnp.float32)
    found, in_few_bits = leaves(in_fp8.quantized("fp8"))
    assert in_few_bits == 4
    assert_same(found, leaves(in_float32)[0])


def test_what_modelopt_writes_beside_config_json_is_read(tmp_path):
    in_fp8, in_float32 = copies(GOLDEN / "gqa", tmp_path, "modelopt")
    config = {name: value for name, value in in_fp8.config.items() if name != "quantization_config"}
    (in_fp8.path / "config.json").write_text(json.dumps(config))
    said = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    beside = in_fp8.path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    assert_same(leaves(Checkpoint(in_fp8.path))[0], leaves(in_float32)[0])
    beside.write_text("{}")
    with pytest.raises(NotImplementedError, match=r"`quantization_config` must be absent, or .* Got quant_algo=None"):
        model_without_weights(Checkpoint(in_fp8.path), dtype=jnp.float32)


def test_scales_of_activations_that_nothing_announces_are_refused(tmp_path):
    in_fp8, _ = copies(GOLDEN / "gqa", tmp_path, more={"input_scale": np.ones((), np.float32)})
    with pytest.raises(ValueError, match=r"must hold only tensors .* Got 21 others, such as '.*.input_scale'"):
        load_model(in_fp8, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("kind", "announced", "message"),
    [
        ("transformers", compressed_tensors(), None),
        ("fbgemm", TRANSFORMERS | {"weight_block_size": [12, 20]}, r"must have shape \[.*\]. Got \[.*, 1\]"),
    ],
)
def test_scales_are_found_by_either_name_and_must_fit(tmp_path, kind, announced, message):
    in_fp8, in_float32 = copies(GOLDEN / "gqa", tmp_path, kind, announced=announced)
    if message is None:
        assert_same(leaves(in_fp8)[0], leaves(in_float32)[0])
        return
    with pytest.raises(ValueError, match=message):
        load_model(in_fp8, dtype=jnp.float32)


def test_blocks_of_compressed_tensors_are_read():
    tokens = TENSOR | {"strategy": "group", "dynamic": True, "group_size": 128}
    announced = compressed_tensors("block", tokens=tokens)
    announced["config_groups"]["group_0"]["weights"]["block_structure"] = [128, 64]
    assert read_quantization({"quantization_config": announced}) == BlockScales(128, 64)


def test_groups_may_be_several():
    groups = compressed_tensors()["config_groups"] | {
        "group_1": compressed_tensors("tensor")["config_groups"]["group_0"]
    }
    announced = compressed_tensors(config_groups=groups, sparsity_config={"format": "dense"}, version="0.12.2")
    assert read_quantization({"quantization_config": announced}) == ChannelScales()


def changed(field, **values):
    """A group of compressed-tensors, in which one scheme has other values."""
    announced = compressed_tensors()
    group = announced["config_groups"]["group_0"]
    group[field] = None if not values else (group[field] or {}) | values
    return announced


@pytest.mark.parametrize(
    ("announced", "got"),
    [
        (compressed_tensors(format="int-quantized"), "format='int-quantized'"),
        (compressed_tensors(format="pack-quantized"), "config_groups.group_0.weights.num_bits=8"),
        (compressed_tensors(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format='sparse-24-bitm"),
        (compressed_tensors(config_groups={}), "config_groups={}"),
        (compressed_tensors("group"), "config_groups.group_0.weights.strategy='group'"),
        (changed("weights", num_bits=4), "config_groups.group_0.weights.num_bits=4"),
        (changed("weights", type="int"), "config_groups.group_0.weights.type='int'"),
        (changed("weights", actorder="group"), "config_groups.group_0.weights.actorder='group'"),
        (changed("weights"), "config_groups.group_0.weights=None"),
        (changed("input_activations", num_bits=4), "config_groups.group_0.input_activations.num_bits=4"),
        (changed("output_activations", num_bits=8), "config_groups.group_0.output_activations={'num_bits': 8}"),
        (compressed_tensors("block"), "config_groups.group_0.input_activations.strategy='token'"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
        ({"quant_method": "modelopt"}, "quant_algo=None"),
        ({"quant_method": "fbgemm_fp8", "bits": 4}, "bits=4"),
        (TRANSFORMERS | {"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes'"),
    ],
)
def test_other_announcements_are_refused_by_what_would_work(announced, got):
    with pytest.raises(NotImplementedError, match=rf"`quantization_config` must be absent, or .* Got {got}"):
        read_quantization({"quantization_config": announced})
