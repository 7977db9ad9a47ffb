"""From a checkpoint's tensors to a model's arrays: stacked over layers, fused side by side, [inputs, outputs]."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.checkpoint import Checkpoint

Path = tuple[Any, ...]
Sources = Mapping[str, int | None]  # tensors that lie side by side in a leaf, and how much of its last axis each takes

_RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what their configuration says anyway


def load(
    state: nnx.State, sources: Mapping[Path, Sources], checkpoint: Checkpoint, *, unused: tuple[str, ...] = ()
) -> nnx.State:
    """A model's state with the checkpoint's values, in the dtypes of `state`.

    One leaf is put together at a time, so that beside the model no more than its largest leaf is held.

    Args:
        state: Abstract, as `nnx.eval_shape` gives it.
        sources: For each leaf its tensors; `{layer}` in a name marks a leaf that is stacked over layers.
        checkpoint: Projections are [outputs, inputs] there.
        unused: Tensors that may be there but have no leaf.

    Raises:
        ValueError: A tensor is missing, has another shape or is no floating-point one, or has no leaf.
    """
    leaves = nnx.to_flat_state(state)
    read: set[str] = set()
    loaded = []
    for path, variable in leaves:
        leaf = _leaf(path, variable.get_value(), sources[path], checkpoint, read)
        loaded.append((path, variable.replace(leaf)))
    left = [name for name in checkpoint.tensor_names if name not in read and name not in unused]
    if left := [name for name in left if not _RECOMPUTED.fullmatch(name)]:
        raise ValueError(
            f"{checkpoint.path} must hold only tensors that {checkpoint.architecture} has a place for. "
            f"Got {len(left)} others, such as {left[0]!r}."
        )
    return nnx.from_flat_state(loaded)


def _leaf(path: Path, abstract: jax.ShapeDtypeStruct, sources: Sources, checkpoint: Checkpoint, read: set[str]) -> Any:
    host = np.empty(abstract.shape, abstract.dtype)
    stacked = "{layer}" in next(iter(sources))
    for layer in range(abstract.shape[0]) if stacked else [None]:
        target = host if layer is None else host[layer]
        start = 0
        for template, width in sources.items():
            name = template.format(layer=layer)
            end = start + (width or target.shape[-1])
            part = target[..., start:end]
            part[...] = _tensor(checkpoint, name, part.shape, transposed=path[-1] == "kernel").astype(host.dtype)
            read.add(name)
            start = end
        assert start == target.shape[-1], f"{path} is not filled"
    return jnp.asarray(host)


def _tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], *, transposed: bool) -> np.ndarray:
    tensor = checkpoint.read(name, shape[::-1] if transposed else shape)
    if not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.dtype.itemsize < 2:
        raise ValueError(f"Tensor {name!r} must be float32, bfloat16 or float16. Got {tensor.dtype}.")
    return tensor.T if transposed else tensor
