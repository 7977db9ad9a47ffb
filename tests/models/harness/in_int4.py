"""Copies of a checkpoint with its projections in int4, as each tool that quantises checkpoints writes them."""

import json
import shutil
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jattn.checkpoint import Checkpoint
from tests.models.harness.in_fp8 import is_projection

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False, "true_sequential": True}


def compressed_tensors(*, group_size=16, symmetric=True, **others):
    """What llm-compressor writes into config.json; groups of None are whole channels."""
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, "observer": "minmax"}
    weights |= {"strategy": "channel" if group_size is None else "group", "group_size": group_size, "actorder": None}
    group = {"targets": ["Linear"], "weights": weights | others, "input_activations": None, "output_activations": None}
    announced = {"format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **announced}


KINDS: dict[str, dict[str, Any]] = {
    "awq": AWQ | {"modules_to_not_convert": None},
    "gptq": GPTQ | {"meta": {"quantizer": ["gptqmodel:2.0.0"]}},
    "gptq_channel": GPTQ | {"sym": True, "group_size": -1, "desc_act": True},
    "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2"},
    "compressed": compressed_tensors(actorder="static"),
    "compressed_channel": compressed_tensors(group_size=None),
    "compressed_zero_points": compressed_tensors(symmetric=False),
}


def packed(numbers, order=range(8)):
    """Each row's numbers of 0 to 15, eight in an int32: the number at order[i] in the i-th four bits."""
    rows, count = numbers.shape
    words = np.zeros((rows, -(-count // 8)), np.uint32)
    for word in range(words.shape[1]):
        for place, number in enumerate(order):
            if 8 * word + number < count:
                words[:, word] |= numbers[:, 8 * word + number].astype(np.uint32) << np.uint32(4 * place)
    return np.ascontiguousarray(words.view(np.int32))


def written(weight, kind, announced):
    """The tensors of a projection [outputs, inputs] by the ends of their names, and what they stand for.

    Zero points are any that four bits hold, 0 and 15 among them, whatever becomes of the weights.
    """
    outputs, inputs = weight.shape
    scheme = announced.get("config_groups", {}).get("group_0", {}).get("weights", announced)
    size = scheme["group_size"] if scheme["group_size"] not in (None, -1) else inputs
    of_input, rng = np.arange(inputs) // size, np.random.default_rng(inputs)
    count = of_input[-1] + 1
    largest = np.stack([np.abs(weight[:, of_input == group]).max(axis=1) for group in range(count)], axis=1)
    dtype = ml_dtypes.bfloat16 if kind.startswith("compressed") else np.float16
    scales = (np.where(largest == 0, 1, largest) / 7).astype(dtype)
    symmetric = scheme.get("sym", scheme.get("symmetric", False))
    zeros = np.full((outputs, count), 8) if symmetric else rng.integers(0, 16, (outputs, count))
    wide = scales.astype(np.float32)[:, of_input]
    numbers = np.clip(np.rint(weight / wide) + zeros[:, of_input], 0, 15).astype(np.int64)
    stands_for = ((numbers - zeros[:, of_input]) * wide).astype(np.float32)
    if kind.startswith("compressed"):
        tensors = {"weight_packed": packed(numbers), "weight_scale": scales, "weight_shape": np.array(weight.shape)}
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(packed(zeros.T).T)
        return tensors, stands_for
    scales = np.ascontiguousarray(scales.T)
    if kind == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": packed(numbers.T, order), "qzeros": packed(zeros.T, order), "scales": scales}, stands_for
    qzeros = packed(zeros.T)
    if announced.get("checkpoint_format") != "gptq_v2":
        qzeros = (qzeros.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    qweight, g_idx = np.ascontiguousarray(packed(numbers).T), of_input.astype(np.int32)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}, stands_for


def copies(folder, into, kind, *, announced=None, chosen=is_projection, changed=lambda tensors: tensors):
    """A checkpoint whose chosen tensors are in int4, and one with what those stand for in float32.

    Args:
        announced: In place of the kind's `quantization_config`.
        changed: What becomes of the tensors of a projection before they are written.
    """
    folders = [shutil.copytree(folder, into / name) for name in ("int4", "float32")]
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_bytes())
    in_int4, in_float32 = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if chosen(name, tensor):
            of_projection, in_float32[name] = written(in_int4.pop(name), kind, KINDS[kind])
            in_int4 |= {name.removesuffix("weight") + end: each for end, each in changed(of_projection).items()}
    announced = KINDS[kind] if announced is None else announced
    fields = (config | {"quantization_config": announced}, config)
    for path, content, each in zip(folders, (in_int4, in_float32), fields, strict=True):
        save_file(content, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(each))
    return [Checkpoint(path) for path in folders]
