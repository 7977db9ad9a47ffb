"""From a checkpoint's tensors to a model's arrays: stacked over layers, fused side by side, [inputs, outputs]."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jattn.matmul import INT4, MXFP4, NUMBERS_OF_BYTE, interleave
from jattn_models.mxfp4 import read_bytes
from jattn_models.sharding import ONLY_RANK, Rank, Sharded, pieces, whole_shape
from jattn_models.stored_tensors import StoredTensors

Path = tuple[Any, ...]
Widths = int | tuple[int, ...] | None
_BESIDE_KERNELS = ("scales", "zero_points")  # in fewer bits


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
class Joined:
    """Several experts that lie in one tensor, one after the other along the axis that devices share.

    Attributes:
        parts: Names of the tensors, one for each of the source's parts.
        count: How many there are.
    """

    parts: tuple[str, ...]
    count: int


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
        alternating: Whether one tensor's blocks lie in it output by output, each block's first, each block's second.
        unit: Outputs that no two devices split, those of a head: of fewer heads than devices several have the same.
        joined: Experts behind those that have a number each; None for none.
        beside: Whose outputs stand behind these, of which each part's width is given then; None for none.
    """

    parts: Mapping[str, Widths]
    sharded: Sharded = None
    numbers: Mapping[str, range] = dataclasses.field(default_factory=dict)
    of_heads: OfHeads | None = None
    alternating: bool = False
    unit: int = 1
    joined: Joined | None = None
    beside: "Source | None" = None

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
        yield from (self.name(part, place) for place in self.places() for part in self.parts)
        if self.joined is not None:
            yield from (self.name(part, place) for place in self.joined_places() for part in self.joined.parts)
        if self.beside is not None:
            yield from self.beside.names()

    def joined_places(self) -> Iterator[tuple[int, ...]]:
        """The leading indices but for the expert's, of tensors that have several."""
        return _indices([len(numbers) for numbers in self.numbers.values()][:-1])

    def name(self, part: str, place: tuple[int, ...]) -> str:
        return part.format(**{key: self.numbers[key][i] for key, i in zip(self.numbers, place, strict=False)})


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
        state: An abstract `nnx.State`, as `nnx.eval_shape` gives it, of one device's share of the model. A kernel that
            has `scales` beside it is in fp8 or int4.
        sources: For each leaf its tensors.
        stored: Projections are [outputs, inputs] there; all experts' in one tensor, [experts, inputs, outputs].
        unread: How the names of tensors begin that may be there but have no leaf.
        rank: The device.

    Raises:
        ValueError: A tensor is missing, has another shape or dtype, or has no leaf.
    """
    leaves = {path: (variable, variable.get_value()) for path, variable in nnx.to_flat_state(state)}
    read = [path for path in leaves if path[-1] not in _BESIDE_KERNELS]
    stored.check_names(itertools.chain.from_iterable(sources[path].names() for path in read), unread)
    loaded = {}
    for path in read:
        source, (_, abstract) = sources[path].on(rank), leaves[path]
        beside = {name: leaves[*path[:-1], name][1] for name in _BESIDE_KERNELS if (*path[:-1], name) in leaves}
        if path[-1] == "kernel" and beside:
            quantized = _in_mxfp4 if abstract.dtype == MXFP4 else _quantized
            parts = quantized({"kernel": abstract, **beside}, source, stored, rank)
            loaded |= {(*path[:-1], name): leaf for name, leaf in parts.items()}
        else:
            loaded[path] = _leaf(abstract, source, stored, rank, is_kernel=path[-1] == "kernel")
    return nnx.from_flat_state([(path, variable.replace(loaded[path])) for path, (variable, _) in leaves.items()])


class _Part(NamedTuple):
    """What one leaf has of one tensor.

    Attributes:
        name: The tensor's.
        shape: The whole tensor's.
        piece: What of it is read; None is all.
        place: Where it lies along the leaf's leading axes.
        start: And along its outputs, or its last axis.
        alternating: Blocks whose outputs alternate in it.
        rows: Which of what is read the leaf has, in its order; None is all.
    """

    name: str
    shape: tuple[int, ...]
    piece: tuple[slice, ...] | None
    place: tuple[int, ...]
    start: int
    alternating: int = 1
    rows: np.ndarray | None = None

    def taken(self, tensor: Any) -> Any:
        return tensor if self.rows is None else tensor[self.rows]


def _leaf(abstract: jax.ShapeDtypeStruct, source: Source, stored: StoredTensors, rank: Rank, *, is_kernel: bool) -> Any:
    leaf, share = None, abstract.shape[len(source.numbers) :]
    transposed = is_kernel and len(share) == 2
    for part in _parts(share, source, rank, transposed=transposed):
        tensor = part.taken(stored.read(part.name, part.shape, part.piece, dtype=abstract.dtype))
        if leaf is None:  # only now: the configuration's shape is the checkpoint's too
            leaf = jnp.zeros(abstract.shape, abstract.dtype)
        if part.rows is not None and not transposed:
            tensor = tensor.reshape(share)
        corner = [*part.place, *[0] * (len(share) - 1), part.start]
        leaf = _placed(leaf, tensor, corner, transposed=transposed, alternating=part.alternating)
    return leaf


def _quantized(
    abstract: Mapping[str, jax.ShapeDtypeStruct], source: Source, stored: StoredTensors, rank: Rank
) -> dict[str, Array]:
    """A kernel in fp8 or int4, and what belongs to it."""
    leaves, (outputs, inputs) = {}, abstract["kernel"].shape[-2:]
    of_scales = abstract["scales"].shape[-2:]
    in_int4, group_size = abstract["kernel"].dtype == INT4, inputs // of_scales[0]
    height, in_blocks = max(1, outputs // of_scales[0]), not in_int4 and of_scales != (outputs, 1)
    for part in _parts((inputs, outputs), source, rank, transposed=True):
        rows, columns = part.shape
        if in_int4:
            kernel = _interleaved(stored.read_in_int4(part.name, (rows, columns), part.piece, group_size))
        elif in_blocks:
            kernel = stored.read_in_blocks(part.name, (rows, columns), part.piece)
        else:
            kernel = stored.read_in_fp8(part.name, (rows, columns), part.piece)
        found = {"kernel": kernel.values, "scales": kernel.scales, "zero_points": kernel.zero_points}
        found = {name: _in_bytes(found[name]) for name in abstract}
        if not leaves:
            leaves = {name: jnp.zeros(*_shape_in_bytes(leaf)) for name, leaf in abstract.items()}
        for name, leaf in leaves.items():
            if in_int4 and name in _BESIDE_KERNELS:  # outputs last
                corner, tensor = [*part.place, 0, part.start], part.taken(found[name].T).T
            else:
                start = part.start // height if in_blocks and name == "scales" else part.start
                corner, tensor = [*part.place, start, 0], part.taken(found[name])
            leaves[name] = _placed(leaf, tensor, corner, transposed=False)
    return {name: _from_bytes(leaf, abstract[name].dtype) for name, leaf in leaves.items()}


def _in_mxfp4(
    abstract: Mapping[str, jax.ShapeDtypeStruct], source: Source, stored: StoredTensors, rank: Rank
) -> dict[str, Array]:
    """The kernel of experts in mxfp4, and its scales."""
    *_, experts, outputs, width = abstract["kernel"].shape
    leaves = {}
    for part in _parts((experts, NUMBERS_OF_BYTE * width, outputs), source, rank, transposed=False):
        kernel = read_bytes(stored.checkpoint, part.name, part.shape, part.piece)
        if not leaves:
            leaves = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in abstract.items()}
        order = np.arange(kernel.values.shape[1]).reshape(-1, part.alternating).T.reshape(-1)
        found = {"kernel": kernel.values[:, order], "scales": kernel.scales[:, :, order]}
        corners = {"kernel": [*part.place, 0, part.start, 0], "scales": [*part.place, 0, 0, part.start]}
        for name, leaf in leaves.items():
            leaves[name] = _placed(leaf, found[name], corners[name], transposed=False)
    return leaves


def _shape_in_bytes(leaf: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], Any]:
    """Of what is placed: of int4 bytes of two neighbours, as nothing smaller can be written by itself."""
    if leaf.dtype != INT4:
        return leaf.shape, leaf.dtype
    return (*leaf.shape[:-1], leaf.shape[-1] // 2), jnp.uint8


_interleaved = jax.jit(interleave)  # on the device


@jax.jit
def _in_bytes(tensor: Array) -> Array:
    if tensor.dtype != INT4:
        return tensor
    return jax.lax.bitcast_convert_type(tensor.reshape(*tensor.shape[:-1], -1, 2), jnp.uint8)


@functools.partial(jax.jit, static_argnames="dtype")
def _from_bytes(leaf: Array, dtype: Any) -> Array:
    return leaf if dtype != INT4 else jax.lax.bitcast_convert_type(leaf, INT4).reshape(*leaf.shape[:-1], -1)


def _parts(share: tuple[int, ...], source: Source, rank: Rank, *, transposed: bool) -> Iterator[_Part]:
    """What fills a leaf.

    Args:
        share: The leaf's shape without its leading axes; of a kernel [inputs, outputs].
        transposed: Whether its tensors are [outputs, inputs].
    """
    if source.beside is not None:
        own = sum(width for part in source.parts for width in source.blocks(part, 0))
        own //= rank.size if source.sharded == "outputs" else 1
        alone = dataclasses.replace(source, beside=None)
        yield from _parts((share[0], own), alone, rank, transposed=transposed)
        for part in _parts((share[0], share[1] - own), source.beside, rank, transposed=transposed):
            yield part._replace(start=own + part.start)
        return
    if source.of_heads is not None:
        yield from _parts_of_heads(share, source, source.of_heads, rank)
        return
    shape = whole_shape(share, source.sharded, rank.size)
    order = slice(None, None, -1) if transposed else slice(None)
    for place in source.places():
        start = 0
        for part in source.parts:
            blocks = source.blocks(part, shape[-1])
            whole = (*shape[:-1], sum(blocks))
            count = len(blocks) if source.alternating else 1
            joined = whole[-1:] if source.alternating else blocks
            for piece in pieces(whole, joined, source.sharded, rank, source.unit):
                read = piece[order] if rank.size > 1 else None
                yield _Part(source.name(part, place), whole[order], read, place, start, count)
                start += piece[-1].stop - piece[-1].start
        assert start == share[-1], f"{source} does not fill {share}"
    if source.joined is not None:
        yield from _parts_joined(shape, source, source.joined, rank, order)


def _parts_joined(shape: tuple[int, ...], source: Source, joined: Joined, rank: Rank, order: slice) -> Iterator[_Part]:
    """Those of the experts behind the others.

    Args:
        shape: Of one of them, whole.
        order: Of a tensor's axes.
    """
    *_, before = (len(numbers) for numbers in source.numbers.values())
    axis = -1 if source.sharded == "outputs" else -2
    for place, number in itertools.product(source.joined_places(), range(joined.count)):
        start = 0
        for part, name in zip(source.parts, joined.parts, strict=True):
            blocks = source.blocks(part, shape[-1])
            whole = [*shape[:-1], sum(blocks)]
            begin = number * whole[axis]
            for piece in pieces(tuple(whole), blocks, source.sharded, rank, source.unit):
                read, tensor = list(piece), list(whole)
                read[axis] = slice(begin + piece[axis].start, begin + piece[axis].stop)
                tensor[axis] *= joined.count
                named = source.name(name, place)
                yield _Part(named, tuple(tensor[order]), tuple(read[order]), (*place, before + number), start)
                start += piece[-1].stop - piece[-1].start


def _parts_of_heads(share: tuple[int, ...], source: Source, of_heads: OfHeads, rank: Rank) -> Iterator[_Part]:
    """Those of a kernel, or of [heads, outputs of a head, inputs]."""
    (part,), taken = source.parts, len(of_heads.order)
    size = 1 if source.sharded is None else rank.size
    heads, inputs = (share[1] // taken, share[0]) if len(share) == 2 else (share[0], share[2])
    count = heads * of_heads.width
    own = (slice(rank.number * count, (rank.number + 1) * count), slice(0, inputs)) if size > 1 else None
    rows = (np.arange(heads)[:, None] * of_heads.width + np.array(of_heads.order)[None]).reshape(-1)
    for place in source.places():
        yield _Part(source.name(part, place), (count * size, inputs), own, place, 0, rows=rows)


def _indices(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not lengths:
        yield ()
        return
    for i in range(lengths[0]):
        for rest in _indices(lengths[1:]):
            yield (i, *rest)


@functools.partial(jax.jit, donate_argnames="leaf", static_argnames=("transposed", "alternating"))
def _placed(leaf: Array, tensor: Array, corner, *, transposed: bool, alternating: int = 1) -> Array:
    """The leaf with one tensor in its place; on the device, which transposes faster than NumPy."""
    part = (tensor.T if transposed else tensor).astype(leaf.dtype)
    if alternating > 1:
        part = jnp.swapaxes(part.reshape(*part.shape[:-1], -1, alternating), -1, -2).reshape(part.shape)
    return jax.lax.dynamic_update_slice(leaf, part.reshape((1,) * (len(corner) - part.ndim) + part.shape), corner)
