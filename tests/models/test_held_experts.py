"""Experts in few bits are held as they are stored where a kernel multiplies them, and stand for what was stored."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jattn.checkpoint import Checkpoint
from jattn.model import model_class
from jattn.parallel import ONE_DEVICE, Parallel
from jattn_kernels.call import Device
from jattn_kernels.reference import dequantized
from tests.models.harness import in_mxfp4
from tests.models.harness.goldens import GOLDEN
from tests.models.harness.smallest import SMALLEST
from tests.models.test_block_scales import FP8, quantised
from tests.often import often, often_together

WIDTH, UNITS, EXPERTS, LAYERS = 128, 256, 2, 2
SPLIT, BY_EXPERT = Parallel("tensor", 2), Parallel("tensor", 2, by_expert=True)
KINDS = (ONE_DEVICE, SPLIT, BY_EXPERT)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))


def leaves(checkpoint, parallel=ONE_DEVICE, rank=0):
    family = model_class(checkpoint.architecture)
    model = family.from_checkpoint(checkpoint, dtype=jnp.bfloat16, parallel=parallel, rank=rank)
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(nnx.state(model))}


def stand_for(held, name):
    """A projection's weights of all layers and experts, [..., inputs, outputs]."""
    values, scales = (held["layers", 0, "mlp", name, leaf] for leaf in ("kernel", "scales"))
    stack = values.shape[:2]
    wide = [dequantized(values[place], scales[place]).T for place in np.ndindex(stack)]
    return np.stack(wide).reshape(*stack, *wide[0].shape)


def assert_held(held, wide, dtype):
    for name in ("gate_up_proj", "down_proj"):
        assert held["layers", 0, "mlp", name, "kernel"].dtype == dtype
        expected = wide["layers", 0, "mlp", name, "kernel"].astype(np.float64)
        np.testing.assert_allclose(stand_for(held, name), expected, rtol=2**-8)
    others = {path: leaf for path, leaf in held.items() if path[-2] not in ("gate_up_proj", "down_proj")}
    for path, leaf in others.items():
        np.testing.assert_array_equal(leaf, wide[path], err_msg=str(path))


def qwen3_moe(folder, block):
    """A checkpoint whose experts alone are in fp8, and one of what they stand for."""
    config = SMALLEST | {"architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": True, "head_dim": 32}
    config |= {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"moe_intermediate_size": UNITS, "num_experts": EXPERTS, "num_experts_per_tok": 1}
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        of_layer = {f"self_attn.{name}_proj": (64, WIDTH) for name in "qkv"} | {"self_attn.o_proj": (WIDTH, 64)}
        of_layer |= {f"self_attn.{name}_norm": (32,) for name in "qk"} | {"mlp.gate": (EXPERTS, WIDTH)}
        of_layer |= {f"{name}_layernorm": (WIDTH,) for name in ("input", "post_attention")}
        for expert in range(EXPERTS):
            of_layer |= {f"mlp.experts.{expert}.{name}_proj": (UNITS, WIDTH) for name in ("gate", "up")}
            of_layer[f"mlp.experts.{expert}.down_proj"] = (WIDTH, UNITS)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    plain = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    in_fp8 = dict(plain)
    for name in plain:
        if ".experts." in name:
            rows, columns = block or (1, plain[name].shape[1])
            in_fp8[name], in_fp8[name + "_scale_inv"], plain[name] = quantised(plain[name], rows, columns)
    announced = FP8 | {"weight_block_size": list(block)} if block else {"quant_method": "fp8"}
    checkpoints = []
    for path, tensors, fields in (("fp8", in_fp8, {"quantization_config": announced}), ("wide", plain, {})):
        (folder / path).mkdir()
        save_file(tensors, folder / path / "model.safetensors")
        (folder / path / "config.json").write_text(json.dumps(config | fields))
        checkpoints.append(Checkpoint(folder / path))
    return checkpoints


HELD = list(itertools.product(KINDS, (None, (128, 128))))


@pytest.mark.parametrize(("parallel", "block"), often_together(HELD, [HELD[1], HELD[2], HELD[5]]))
def test_experts_in_fp8_are_held_as_stored(tmp_path, hopper, block, parallel):
    in_fp8, wide = qwen3_moe(tmp_path, block)
    for rank in range(parallel.size):
        assert_held(leaves(in_fp8, parallel, rank), leaves(wide, parallel, rank), jnp.float8_e4m3fn)


def test_experts_are_wide_where_no_kernel_takes_them(tmp_path):
    in_fp8, wide = (leaves(each) for each in qwen3_moe(tmp_path, (128, 128)))
    assert in_fp8.keys() == wide.keys()
    assert in_fp8["layers", 0, "mlp", "down_proj", "kernel"].dtype == jnp.bfloat16


def test_experts_are_rounded_to_fp8_while_they_load(tmp_path, hopper):
    _, wide = qwen3_moe(tmp_path, None)
    held = leaves(wide.quantized("fp8"))
    assert held["layers", 0, "mlp", "down_proj", "kernel"].dtype == jnp.float8_e4m3fn
    expected = leaves(wide)["layers", 0, "mlp", "down_proj", "kernel"].astype(np.float64)
    off = stand_for(held, "down_proj") - expected
    # They are numbers that fp8 has, but for bfloat16's last place.
    assert np.linalg.norm(off) < 2**-8 * np.linalg.norm(expected)


@pytest.mark.parametrize("parallel", often(KINDS, [SPLIT]))
def test_experts_in_mxfp4_are_held_as_stored(tmp_path, hopper, parallel):
    folder = tmp_path / "wider"
    folder.mkdir()
    config = json.loads((GOLDEN / "gpt_oss" / "config.json").read_bytes()) | {
        "intermediate_size": 128,
        "num_key_value_heads": 4,
    }
    rng, tensors = np.random.default_rng(0), load_file(GOLDEN / "gpt_oss" / "model.safetensors")
    width = 64
    for name, tensor in tensors.items():
        shape = [2 * 128 if "experts.gate_up" in name and n == tensor.shape[-1] else n for n in tensor.shape]
        if name.endswith("experts.down_proj"):
            shape[1] = 128
        shape = [width if n == config["hidden_size"] else n for n in shape]
        tensors[name] = rng.standard_normal(shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": width}))
    packed, wide = (Checkpoint(path) for path in in_mxfp4.copies(folder, tmp_path))
    for rank in range(parallel.size):
        assert_held(leaves(packed, parallel, rank), leaves(wide, parallel, rank), jnp.uint8)
