"""Weights in fp8 with a scale for each block: loaded as what they stand for, whatever the family and the share."""

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jattn.checkpoint import Checkpoint
from jattn.model import model_class
from jattn.parallel import ONE_DEVICE, Parallel
from jattn_models.llama_config import LlamaConfig
from jattn_models.quantization import BlockScales
from jattn_models.quantization_config import read_quantization
from tests.models.harness.goldens import GOLDEN, OTHER_CASES
from tests.models.harness.smallest import SMALLEST
from tests.often import often

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


def quantised(weight, rows, columns):
    """A tensor in fp8, the scales of its blocks, and what the two stand for."""
    scales = np.empty([-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)], np.float32)
    small, stands_for = np.empty(weight.shape, ml_dtypes.float8_e4m3fn), np.empty(weight.shape, np.float32)
    for i, j in np.ndindex(scales.shape):
        block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
        scales[i, j] = np.abs(weight[block]).max() / LARGEST
        small[block] = (weight[block] / scales[i, j]).astype(small.dtype)
        stands_for[block] = small[block].astype(np.float32) * scales[i, j]
    return small, scales, stands_for


def written(folder, tensors, config):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(folder)


def both(tmp_path, case, block):
    """A golden checkpoint with its projections in fp8, and with what those stand for in float32."""
    folders = [shutil.copytree(GOLDEN / case, tmp_path / name) for name in ("fp8", "float32")]
    tensors, config = load_file(folders[0] / "model.safetensors"), json.loads((folders[0] / "config.json").read_bytes())
    in_fp8, in_float32 = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith("model.layers.") and tensor.ndim == 2 and "_proj" in name:
            in_fp8[name], in_fp8[name + "_scale_inv"], in_float32[name] = quantised(tensor, *block)
    announced = {"quantization_config": FP8 | {"weight_block_size": list(block)}}
    return written(folders[0], in_fp8, config | announced), written(folders[1], in_float32, config)


def loaded(checkpoint, dtype=jnp.float32, parallel=ONE_DEVICE, rank=0):
    model = model_class(checkpoint.architecture).from_checkpoint(checkpoint, dtype=dtype, parallel=parallel, rank=rank)
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(nnx.state(model))}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert found[path].dtype == leaf.dtype
        np.testing.assert_array_equal(found[path], leaf, err_msg=str(path))


# Parts of heads and experts, projections that are one tensor, and plain ones: the other families add nothing.
VARIOUS = ("deepseek_v3", "phi3", "qwen3")


@pytest.mark.parametrize("case", often(("gqa", *OTHER_CASES), VARIOUS[:2]))
def test_weights_in_fp8_are_loaded_as_what_they_stand_for(tmp_path, case):
    """Blocks do not divide what they are of."""
    in_fp8, in_float32 = both(tmp_path, case, (12, 20))
    assert_same(loaded(in_fp8), loaded(in_float32))


def test_blocks_of_128_with_ragged_last_ones_are_rounded_once_to_the_models_dtype(tmp_path):
    rng, width, units = np.random.default_rng(0), 160, 300
    shapes = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (units, width), "mlp.up_proj": (units, width), "mlp.down_proj": (width, units)}
    ones = dict.fromkeys(["model.norm.weight"], np.ones(width, np.float32))
    ones |= {
        f"model.layers.0.{name}_layernorm.weight": ones["model.norm.weight"] for name in ("input", "post_attention")
    }
    embedding = {"model.embed_tokens.weight": rng.normal(size=(64, width)).astype(np.float32)}
    in_fp8, in_float32 = ones | embedding, ones | embedding
    for name, shape in shapes.items():
        name = f"model.layers.0.{name}.weight"
        weight = rng.normal(size=shape) * np.exp(rng.normal(size=shape))
        in_fp8[name], in_fp8[name + "_scale_inv"], in_float32[name] = quantised(weight.astype(np.float32), 128, 128)
    config = SMALLEST | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "num_hidden_layers": 1}
    config |= {"hidden_size": width, "intermediate_size": units, "num_attention_heads": 4}
    folders = [tmp_path / name for name in ("fp8", "float32")]
    for folder in folders:
        folder.mkdir()
    found = loaded(written(folders[0], in_fp8, config | {"quantization_config": FP8}), jnp.bfloat16)
    assert_same(found, loaded(written(folders[1], in_float32, config), jnp.bfloat16))


@pytest.mark.parametrize("case", often(VARIOUS, VARIOUS[:2]))
def test_share_in_fp8_is_that_of_what_it_stands_for_and_reads_no_more(tmp_path, case, monkeypatch):
    in_fp8, in_float32 = both(tmp_path, case, (12, 20))
    read = Checkpoint.read
    sizes = {"fp8": 0, "float32": 0, "scales": 0}

    def counted(self, name, shape=None, piece=None):
        tensor = read(self, name, shape, piece)
        sizes["scales" if name.endswith("_scale_inv") else self.path.name] += tensor.size
        return tensor

    monkeypatch.setattr(Checkpoint, "read", counted)
    for rank in range(2):
        share = {"parallel": Parallel("tensor", 2), "rank": rank}
        assert_same(loaded(in_fp8, **share), loaded(in_float32, **share))
    assert sizes["fp8"] == sizes["float32"]
    assert 0 < sizes["scales"] < sizes["fp8"] / 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_scale_inv": None}, "must hold the tensor '.*down_proj.weight_scale_inv', which is missing"),
        ({"_scale_inv": np.ones((3, 4), np.float32)}, r"_scale_inv' of .* must have shape \[3, 3\]. Got \[3, 4\]"),
        ({"_scale_inv": np.ones((3, 3), np.int32)}, "_scale_inv' must be one of float32, .*. Got int32"),
        ({"": np.ones((32, 48), np.float32)}, "down_proj.weight' must be one of float8_e4m3fn. Got float32"),
    ],
)
def test_tensor_and_scales_that_do_not_go_together_are_named(tmp_path, changes, message):
    checkpoint, _ = both(tmp_path, "mha", (12, 20))
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensor_names}
    tensors |= {f"model.layers.1.mlp.down_proj.weight{end}": tensor for end, tensor in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        loaded(written(checkpoint.path, tensors, checkpoint.config))


def test_scales_that_nothing_announces_are_refused(tmp_path):
    checkpoint, _ = both(tmp_path, "mha", (12, 20))
    del checkpoint.config["quantization_config"]
    with pytest.raises(ValueError, match=r"must hold only tensors .* Got 14 others, such as '.*_scale_inv'"):
        loaded(checkpoint)


@pytest.mark.parametrize("more", [{}, {"fmt": None}, {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}])
def test_announcements_of_fp8_in_blocks_are_read(more):
    fields = SMALLEST | {"quantization_config": FP8 | more}
    assert LlamaConfig.from_dict(fields).quantization == BlockScales(128, 128)
    assert LlamaConfig.from_dict(SMALLEST | {"quantization_config": {}}).quantization is None


@pytest.mark.parametrize(
    ("announced", "got"),
    [
        (FP8 | {"quant_method": "hqq", "bits": 4}, "quant_method='hqq'"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme='static'"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        (FP8 | {"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
        (FP8 | {"weight_block_size": [128, True]}, r"weight_block_size=\[128, True\]"),
        ({"bits": 4}, "quant_method=None"),
        ("fp8", "'fp8'"),
    ],
)
def test_other_announcements_are_refused_by_what_would_work(announced, got):
    with pytest.raises(NotImplementedError, match=rf"`quantization_config` must be absent, or .*blocks?.* Got {got}"):
        read_quantization({"quantization_config": announced})
