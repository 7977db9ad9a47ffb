"""From a checkpoint's tensors to a model's arrays: stacked over layers, fused side by side, [inputs, outputs]."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jattn_models.sharding import ONLY_RANK, Rank, Sharded, pieces, whole_shape
from jattn_models.stored_tensors import StoredTensors

Path = tuple[Any, ...]
Widths = int | tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class OfHeads:
    """Which of a head's outputs in a tensor a leaf has.

    Attributes:
        width: Outputs of a head in the tensor.
        order: The numbers of those that the leaf has, in its order.
    """

    width: int
    order: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a leaf comes from.

    Attributes:
        parts: Names of the tensors that lie side by side in it, and how much of its last axis each takes; None is all.
            Several widths are those of the blocks that lie side by side in one tensor.
        sharded: Along which axis several devices share it: the outputs, each block by itself; the inputs, or the
            embedding's tokens; the heads or the experts; None where each device has all of it.
        numbers: What fills a placeholder of the names, such as `{layer}`; the leaf has a leading axis for each.
        of_heads: Some of each head's outputs are in the leaf, which is a kernel or [heads, outputs of a head, inputs];
            None where all are. Such a leaf has one part.
        unit: Outputs that no two devices split, those of a head: of fewer heads than devices several have the same.
    """

    parts: Mapping[str, Widths]
    sharded: Sharded = None
    numbers: Mapping[str, range] = dataclasses.field(default_factory=dict)
    of_heads: OfHeads | None = None
    unit: int = 1

    def on(self, rank: Rank) -> "Source":
        """The source of a device's leaf, where that has some of the experts whole, a tensor each."""
        if self.sharded != "experts" or "expert" not in self.numbers:
            return self
        numbers = {**self.numbers, "expert": rank.part(self.numbers["expert"])}
        return dataclasses.replace(self, sharded=None, numbers=numbers)

    def places(self) -> Iterator[tuple[int, ...]]:
        """The leading indices, the last axis fastest; a configuration may claim more than any memory holds."""
        return _indices([len(numbers) for numbers in self.numbers.values()])

    def blocks(self, part: str, width: int) -> tuple[int, ...]:
        """The widths of a tensor's blocks in a leaf of `width` outputs on one device."""
        widths = self.parts[part]
        return widths if isinstance(widths, tuple) else (width if widths is None else widths,)

    def names(self) -> Iterator[str]:
        """The tensors that it is made of, one a part and place."""
        return (self.name(part, place) for place in self.places() for part in self.parts)

    def name(self, part: str, place: tuple[int, ...]) -> str:
        return part.format(**{key: self.numbers[key][i] for key, i in zip(self.numbers, place, strict=True)})


def load(
    state: Any,
    sources: Mapping[Path, Source],
    stored: StoredTensors,
    *,
    unread: tuple[str, ...] = (),
    rank: Rank = ONLY_RANK,
) -> Any:
    """A model's state with the checkpoint's values, in the dtypes of `state`.

    Tensors go to the device one at a time, so that beside the model no more than one of them is held; of what devices
    share, a device's part alone is read.

    Args:
        state: An abstract `nnx.State`, as `nnx.eval_shape` gives it, of one device's share of the model.
        sources: For each leaf its tensors.
        stored: Projections are [outputs, inputs] there; all experts' in one tensor, [experts, inputs, outputs].
        unread: How the names of tensors begin that may be there but have no leaf.
        rank: The device.

    Raises:
        ValueError: A tensor is missing, has another shape or dtype, or has no leaf.
    """
    leaves = [(path, variable, variable.get_value()) for path, variable in nnx.to_flat_state(state)]
    stored.check_names(itertools.chain.from_iterable(sources[path].names() for path, _, _ in leaves), unread)
    loaded = [
        (path, variable.replace(_leaf(path, abstract, sources[path].on(rank), stored, rank)))
        for path, variable, abstract in leaves
    ]
    return nnx.from_flat_state(loaded)


def _leaf(path: Path, abstract: jax.ShapeDtypeStruct, source: Source, stored: StoredTensors, rank: Rank) -> Any:
    if source.of_heads is not None:
        return _leaf_of_heads(abstract, source, source.of_heads, stored, rank)
    leaf = None
    share = abstract.shape[len(source.numbers) :]
    shape = whole_shape(share, source.sharded, rank.size)
    transposed = path[-1] == "kernel" and len(share) == 2
    for place in source.places():
        start = 0
        for part in source.parts:
            blocks = source.blocks(part, shape[-1])
            whole = (*shape[:-1], sum(blocks))
            for piece in pieces(whole, blocks, source.sharded, rank, source.unit):
                order = slice(None, None, -1) if transposed else slice(None)
                read = piece[order] if rank.size > 1 else None
                tensor = stored.read(source.name(part, place), whole[order], read, dtype=abstract.dtype)
                if leaf is None:  # only now: the configuration's shape is the checkpoint's too
                    leaf = jnp.zeros(abstract.shape, abstract.dtype)
                leaf = _placed(leaf, tensor, place, start, transposed=transposed)
                start += piece[-1].stop - piece[-1].start
        assert start == share[-1], f"{path} is not filled"
    return leaf


def _leaf_of_heads(
    abstract: jax.ShapeDtypeStruct, source: Source, of_heads: OfHeads, stored: StoredTensors, rank: Rank
) -> Any:
    (part,), leaf, taken = source.parts, None, len(of_heads.order)
    share, size = abstract.shape[len(source.numbers) :], 1 if source.sharded is None else rank.size
    is_kernel = len(share) == 2
    heads, inputs = (share[1] // taken, share[0]) if is_kernel else (share[0], share[2])
    rows = heads * of_heads.width
    own = (slice(rank.number * rows, (rank.number + 1) * rows), slice(0, inputs)) if size > 1 else None
    for place in source.places():
        tensor = stored.read(source.name(part, place), (rows * size, inputs), own, dtype=abstract.dtype)
        tensor = tensor.reshape(heads, of_heads.width, inputs)[:, np.array(of_heads.order)]
        if leaf is None:
            leaf = jnp.zeros(abstract.shape, abstract.dtype)
        leaf = _placed(leaf, tensor.reshape(-1, inputs) if is_kernel else tensor, place, 0, transposed=is_kernel)
    return leaf


def _indices(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not lengths:
        yield ()
        return
    for i in range(lengths[0]):
        for rest in _indices(lengths[1:]):
            yield (i, *rest)


@functools.partial(jax.jit, donate_argnames="leaf", static_argnames="transposed")
def _placed(leaf: Array, tensor: Array, place, start, *, transposed: bool) -> Array:
    """The leaf with one tensor in its place; on the device, which transposes faster than NumPy."""
    part = (tensor.T if transposed else tensor).astype(leaf.dtype)
    corner = [*place, *([0] * (part.ndim - 1)), start]
    return jax.lax.dynamic_update_slice(leaf, part.reshape((1,) * len(place) + part.shape), corner)
