"""Copies of a checkpoint with its projections in fp8, as each tool that quantises checkpoints writes them."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jattn.checkpoint import Checkpoint

LARGEST = np.float32(448)
_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "observer": "minmax", "group_size": None}
_TOKENS = _SCHEME | {"strategy": "token", "dynamic": True}


def compressed_tensors(strategy="channel", *, tokens=_TOKENS, **others):
    """What llm-compressor writes into config.json."""
    weights = _SCHEME | {"strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens, "output_activations": None}
    announced = {"format": "float-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **announced, **others}


_FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
TRANSFORMERS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
# What config.json announces, what the scales are called, and their shape for so many outputs; one number if it is ().
KINDS: dict[str, tuple[dict[str, Any], str, Callable[[int], tuple[int, ...]]]] = {
    "compressed_channel": (compressed_tensors(), "_scale", lambda outputs: (outputs, 1)),
    "compressed_tensor": (compressed_tensors("tensor"), "_scale", lambda outputs: (1,)),
    "fbgemm": (_FBGEMM, "_scale", lambda outputs: (outputs, 1)),
    "transformers": (TRANSFORMERS, "_scale_inv", lambda outputs: ()),
    "autofp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "_scale", lambda outputs: (1,)),
    "modelopt": (MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "_scale", lambda outputs: (outputs,)),
}


def quantised(weight, shape=None):
    """A tensor in fp8, its scales of this shape ([outputs, 1] if None), and what the two stand for."""
    per_channel = shape is None or shape[:1] == weight.shape[:1]
    largest = np.abs(weight).max(axis=1 if per_channel else None, keepdims=True)
    scales = np.where(largest == 0, np.float32(1), largest * np.float32(1 / LARGEST)).astype(np.float32)
    small = np.clip(weight / scales, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
    return small, scales.reshape(scales.shape if shape is None else shape), small.astype(np.float32) * scales


def is_projection(name, tensor):
    is_of_text = "layers." in name and "vision" not in name
    return is_of_text and tensor.ndim == 2 and ("_proj" in name or "c_fc" in name)


def copies(folder, into, kind="compressed_channel", *, announced=None, chosen=is_projection, more=None):
    """A checkpoint whose chosen tensors are in fp8, and one with what those stand for in float32.

    Args:
        announced: In place of the kind's `quantization_config`.
        more: Tensors for each that is in fp8, by the end of the module's name.
    """
    folders = [shutil.copytree(folder, into / name) for name in ("fp8", "float32")]
    tensors, config = load_file(folders[0] / "model.safetensors"), json.loads((folders[0] / "config.json").read_bytes())
    written, end, shape = KINDS[kind]
    in_fp8, in_float32 = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if chosen(name, tensor):
            in_fp8[name], in_fp8[name + end], in_float32[name] = quantised(tensor, shape(len(tensor)))
            in_fp8 |= {name.removesuffix("weight") + other: value for other, value in (more or {}).items()}
    config_in_fp8 = config | {"quantization_config": written if announced is None else announced}
    for path, content, fields in zip(folders, (in_fp8, in_float32), (config_in_fp8, config), strict=True):
        save_file(content, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(fields))
    return [Checkpoint(path) for path in folders]
