"""A copy of gpt-oss's checkpoint whose experts are in mxfp4, as its publisher writes them; needs NumPy alone."""

import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # of e2m1, in the order of their codes
GROUP = 32  # inputs that share a scale
ANNOUNCED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def quantised(weight):
    """Blocks and scales of experts' kernels, [experts, inputs, outputs], and what they stand for.

    Scales are powers of two, by which the largest number of a group comes below 8, and those above 6 become 6.
    """
    groups = np.ascontiguousarray(weight.swapaxes(1, 2)).reshape(len(weight), weight.shape[2], -1, GROUP)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    exponents = np.floor(np.log2(np.where(largest == 0, 1, largest))).astype(np.int32) - 2
    scaled = np.ldexp(groups, -exponents)
    nearest = np.abs(np.abs(scaled)[..., None] - MAGNITUDES).argmin(axis=-1).astype(np.uint8)
    codes = nearest | (np.signbit(scaled).astype(np.uint8) << 3)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    stands_for = np.ldexp(np.where(np.signbit(scaled), -1, 1) * MAGNITUDES[nearest], exponents)
    stands_for = stands_for.reshape(len(weight), weight.shape[2], -1).swapaxes(1, 2)
    return blocks, (exponents[..., 0] + 127).astype(np.uint8), np.ascontiguousarray(stands_for, np.float32)


def is_of_experts(name):
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def copies(folder: pathlib.Path, into: pathlib.Path) -> list[pathlib.Path]:
    """A checkpoint whose experts are in mxfp4, and one with what those stand for."""
    folders = [pathlib.Path(shutil.copytree(folder, into / name)) for name in ("mxfp4", "float32")]
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_bytes())
    packed, plain = dict(tensors), dict(tensors)
    for name in filter(is_of_experts, tensors):
        packed[name + "_blocks"], packed[name + "_scales"], plain[name] = quantised(packed.pop(name))
    announced = config | {"quantization_config": ANNOUNCED}
    for path, content, fields in zip(folders, (packed, plain), (announced, config), strict=True):
        save_file(content, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(fields))
    return folders
