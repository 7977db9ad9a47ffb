"""From a checkpoint's tensors to a model's arrays: stacked over layers, fused side by side, [inputs, outputs]."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jattn.checkpoint import Checkpoint

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a leaf comes from.

    Attributes:
        parts: Names of the tensors that lie side by side in it, and how much of its last axis each takes; None is all.
        numbers: What fills a placeholder of the names, such as `{layer}`; the leaf has a leading axis for each.
    """

    parts: Mapping[str, int | None]
    numbers: Mapping[str, range] = dataclasses.field(default_factory=dict)

    def places(self) -> Iterator[tuple[int, ...]]:
        """The leading indices, the last axis fastest; a configuration may claim more than any memory holds."""
        return _indices([len(numbers) for numbers in self.numbers.values()])

    def name(self, part: str, place: tuple[int, ...]) -> str:
        return part.format(**{key: self.numbers[key][i] for key, i in zip(self.numbers, place, strict=True)})


_DTYPES = ("float32", "bfloat16", "float16")
_RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what their configuration says anyway


def load(state: Any, sources: Mapping[Path, Source], checkpoint: Checkpoint, *, unused: tuple[str, ...] = ()) -> Any:
    """A model's state with the checkpoint's values, in the dtypes of `state`.

    Tensors go to the device one at a time, so that beside the model no more than one of them is held.

    Args:
        state: An abstract `nnx.State`, as `nnx.eval_shape` gives it.
        sources: For each leaf its tensors.
        checkpoint: Projections are [outputs, inputs] there; all experts' in one tensor, [experts, inputs, outputs].
        unused: Tensors that may be there but have no leaf.

    Raises:
        ValueError: A tensor is missing, has another shape or dtype, or has no leaf.
    """
    leaves = [(path, variable, variable.get_value()) for path, variable in nnx.to_flat_state(state)]
    _check_names([sources[path] for path, _, _ in leaves], checkpoint, unused)
    loaded = [
        (path, variable.replace(_leaf(path, abstract, sources[path], checkpoint)))
        for path, variable, abstract in leaves
    ]
    return nnx.from_flat_state(loaded)


def _check_names(sources: list[Source], checkpoint: Checkpoint, unused: tuple[str, ...]) -> None:
    """Checks the names alone, before memory is taken for all the layers that a configuration claims."""
    left = dict.fromkeys(checkpoint.tensor_names)
    for source in sources:
        for place in source.places():
            for part in source.parts:
                name = source.name(part, place)
                if name not in left:
                    checkpoint.read(name)  # raises: it is missing
                left.pop(name, None)
    if others := [name for name in left if name not in unused and not _RECOMPUTED.fullmatch(name)]:
        raise ValueError(
            f"{checkpoint.path} must hold only tensors that {checkpoint.architecture} has a place for. "
            f"Got {len(others)} others, such as {others[0]!r}."
        )


def _leaf(path: Path, abstract: jax.ShapeDtypeStruct, source: Source, checkpoint: Checkpoint) -> Any:
    leaf = None
    shape, transposed = (
        abstract.shape[len(source.numbers) :],
        path[-1] == "kernel" and len(abstract.shape) - len(source.numbers) == 2,
    )
    for place in source.places():
        start = 0
        for part, width in source.parts.items():
            part_shape = (*shape[:-1], width or shape[-1])
            tensor = _tensor(checkpoint, source.name(part, place), part_shape[::-1] if transposed else part_shape)
            if leaf is None:  # only now: the configuration's shape is the checkpoint's too
                leaf = jnp.zeros(abstract.shape, abstract.dtype)
            leaf = _placed(leaf, tensor, place, start, transposed=transposed)
            start += part_shape[-1]
        assert start == shape[-1], f"{path} is not filled"
    return leaf


def _indices(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not lengths:
        yield ()
        return
    for i in range(lengths[0]):
        for rest in _indices(lengths[1:]):
            yield (i, *rest)


def _tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    tensor = checkpoint.read(name, shape)
    if tensor.dtype.name not in _DTYPES:
        raise ValueError(f"Tensor {name!r} must be one of {', '.join(_DTYPES)}. Got {tensor.dtype}.")
    return tensor


@functools.partial(jax.jit, donate_argnames="leaf", static_argnames="transposed")
def _placed(leaf: Array, tensor: Array, place, start, *, transposed: bool) -> Array:
    """The leaf with one tensor in its place; on the device, which transposes faster than NumPy."""
    part = (tensor.T if transposed else tensor).astype(leaf.dtype)
    corner = [*place, *([0] * (part.ndim - 1)), start]
    return jax.lax.dynamic_update_slice(leaf, part.reshape((1,) * len(place) + part.shape), corner)
