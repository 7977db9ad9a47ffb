"""From a checkpoint's tensors to a model's arrays: stacked over layers, fused side by side, [inputs, outputs]."""

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jattn.checkpoint import Checkpoint

Path = tuple[Any, ...]
Sources = Mapping[str, int | None]  # tensors that lie side by side in a leaf, and how much of its last axis each takes

_DTYPES = ("float32", "bfloat16", "float16")
_RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what their configuration says anyway


def load(state: Any, sources: Mapping[Path, Sources], checkpoint: Checkpoint, *, unused: tuple[str, ...] = ()) -> Any:
    """A model's state with the checkpoint's values, in the dtypes of `state`.

    Tensors go to the device one at a time, so that beside the model no more than one of them is held.

    Args:
        state: An abstract `nnx.State`, as `nnx.eval_shape` gives it.
        sources: For each leaf its tensors; `{layer}` in a name marks a leaf that is stacked over layers.
        checkpoint: Projections are [outputs, inputs] there.
        unused: Tensors that may be there but have no leaf.

    Raises:
        ValueError: A tensor is missing, has another shape or dtype, or has no leaf.
    """
    leaves = [(path, variable, variable.get_value()) for path, variable in nnx.to_flat_state(state)]
    _check_names([(abstract, sources[path]) for path, _, abstract in leaves], checkpoint, unused)
    loaded = [
        (path, variable.replace(_leaf(path, abstract, sources[path], checkpoint)))
        for path, variable, abstract in leaves
    ]
    return nnx.from_flat_state(loaded)


def _check_names(
    leaves: list[tuple[jax.ShapeDtypeStruct, Sources]], checkpoint: Checkpoint, unused: tuple[str, ...]
) -> None:
    """Checks the names alone, before memory is taken for all the layers that a configuration claims."""
    left = dict.fromkeys(checkpoint.tensor_names)
    for abstract, sources in leaves:
        for layer in range(_num_layers(abstract, sources)):
            for template in sources:
                name = template.format(layer=layer)
                if name not in left:
                    checkpoint.read(name)  # raises: it is missing
                left.pop(name, None)
    if others := [name for name in left if name not in unused and not _RECOMPUTED.fullmatch(name)]:
        raise ValueError(
            f"{checkpoint.path} must hold only tensors that {checkpoint.architecture} has a place for. "
            f"Got {len(others)} others, such as {others[0]!r}."
        )


def _is_stacked(sources: Sources) -> bool:
    return "{layer}" in next(iter(sources))


def _num_layers(abstract: jax.ShapeDtypeStruct, sources: Sources) -> int:
    return abstract.shape[0] if _is_stacked(sources) else 1


def _leaf(path: Path, abstract: jax.ShapeDtypeStruct, sources: Sources, checkpoint: Checkpoint) -> Any:
    leaf = None
    stacked = _is_stacked(sources)
    shape, transposed = abstract.shape[stacked:], path[-1] == "kernel"
    for layer in range(_num_layers(abstract, sources)):
        start = 0
        for template, width in sources.items():
            name = template.format(layer=layer)
            part = (*shape[:-1], width or shape[-1])
            tensor = _tensor(checkpoint, name, part[::-1] if transposed else part)
            if leaf is None:  # only now: the configuration's shape is the checkpoint's too
                leaf = jnp.zeros(abstract.shape, abstract.dtype)
            leaf = _placed(leaf, tensor, layer, start, stacked=stacked, transposed=transposed)
            start += part[-1]
        assert start == shape[-1], f"{path} is not filled"
    return leaf


def _tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    tensor = checkpoint.read(name, shape)
    if tensor.dtype.name not in _DTYPES:
        raise ValueError(f"Tensor {name!r} must be one of {', '.join(_DTYPES)}. Got {tensor.dtype}.")
    return tensor


@functools.partial(jax.jit, donate_argnames="leaf", static_argnames=("stacked", "transposed"))
def _placed(leaf: Array, tensor: Array, layer, start, *, stacked: bool, transposed: bool) -> Array:
    """The leaf with one tensor in its place; on the device, which transposes faster than NumPy."""
    part = (tensor.T if transposed else tensor).astype(leaf.dtype)
    corner = [*([layer] * stacked), *([0] * (part.ndim - 1)), start]
    return jax.lax.dynamic_update_slice(leaf, part[None] if stacked else part, corner)
