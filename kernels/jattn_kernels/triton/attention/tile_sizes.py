"""Tile sizes of attention, by what a GPU's shared memory and registers hold, or as a file of `bench.tune` tells."""

import dataclasses
from typing import NamedTuple

import triton

from jattn_kernels.call import AttentionCall, Device
from jattn_kernels.lowering.tile_file import TileFile
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.triton.attention.config import LEAST_BLOCK, Parts, key_parts, parts_of
from jattn_kernels.triton.gpus import SHARED_MEMORY, num_sms

_DECODE_ROWS = 64  # rows of a decode tile at most
_WAVES = 4  # programs that decode wants for each place on an SM: sequences differ, and the last ones must not be few
_ROOMY = 128 * 1024  # bytes of shared memory; desktop GPUs have less
_ROWS_OF_FOUR_WARPS = 32 * 128  # numbers of the accumulator
_OTHER_BYTES = 8 * 1024
_MOST_AHEAD = 3
_INVARIANT_KEYS = 512  # of a split, where it must not depend on the batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendTiles:
    """Sizes that the kernel is compiled for.

    Attributes:
        block_m: Rows, which are tokens times the query heads of a group.
        block_n: Keys a tile.
        stages: Of the pipeline: tiles that are loaded ahead, one more that is computed with, and one for page numbers.
        warps: Of a program.
        block_tokens: Tokens of a work tile.
        row_blocks: Blocks of rows of a work tile.
        workers: Into how many shares decode cuts the keys.
        tiles_per_split: Tiles of keys after which sequences are cut, where that must not depend on the batch.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    block_tokens: int
    row_blocks: int
    workers: int
    tiles_per_split: int | None


class Shape(NamedTuple):
    """What the best sizes depend on.

    Attributes:
        operation: "decode" or "extend".
        rows: Query rows of a tile as the rule has them.
        kv_itemsize: Bytes of a number of a key or value.
        paged, latent, rotates: Whether keys lie in pages, are values too, and are rotated.
    """

    operation: str
    rows: int
    head_dim: int
    v_head_dim: int
    kv_itemsize: int
    paged: bool
    latent: bool
    rotates: bool


class Arrangement(NamedTuple):
    """What is chosen: rows, keys a tile, tiles that are loaded ahead, and warps."""

    block_m: int
    block_n: int
    ahead: int
    warps: int


TILES = TileFile("JATTN_TRITON_TILES", Shape, Arrangement)


def row_numbers(spec: AttentionSpec, *, latent: bool) -> tuple[Parts, Parts]:
    """The parts of keys and of values."""
    value = Parts(spec.value_dim, 0) if latent else parts_of(spec.value_dim)
    return key_parts(spec, latent=latent), value


def choose_tiles(call: AttentionCall) -> AttendTiles:
    """The sizes for a call.

    Raises:
        ValueError: Sizes that were told cannot be read, or do not fit.
    """
    found, rule = TILES.tuned(shape_of(call)), by_rule(call)
    if found is not None and found not in arrangements(call):
        raise ValueError(f"Sizes that ${TILES.variable} tells do not fit this GPU. Got {found} for {shape_of(call)}.")
    block_m, block_n, ahead, warps = found or rule
    spec, decode, device = call.spec, _is_decode(call), call.device
    assert call.num_tokens is not None
    block_tokens = call.num_tokens if decode else max(block_m // spec.group_size, 1)
    row_blocks = -(-block_tokens * spec.group_size // block_m)
    needed = _bytes(call, Arrangement(block_m, block_n, ahead, warps))
    places = num_sms(device) * max(min(_shared_memory(device) // needed, 3), 1)
    return AttendTiles(
        block_m=block_m,
        block_n=block_n,
        stages=ahead + (1 if call.page_size is None else 2),
        warps=warps,
        block_tokens=block_tokens,
        row_blocks=row_blocks,
        workers=max(places * _WAVES // (spec.num_kv_heads * row_blocks), 1),
        tiles_per_split=max(_INVARIANT_KEYS // block_n, 1) if decode and spec.batch_invariant else None,
    )


def shape_of(call: AttentionCall) -> Shape:
    """What the choice of sizes depends on, but for the GPU."""
    spec = call.spec
    return Shape(
        operation="decode" if _is_decode(call) else "extend",
        rows=by_rule(call).block_m,
        head_dim=spec.head_dim,
        v_head_dim=spec.value_dim,
        kv_itemsize=_itemsize(call),
        paged=call.page_size is not None,
        latent=_is_latent(call),
        rotates=spec.rope_theta is not None,
    )


def by_rule(call: AttentionCall) -> Arrangement:
    """Tiles as large as registers hold without spilling, and as many ahead as let two programs share an SM in decode.

    Of a device that is no NVIDIA GPU, those of compute capability 8.0.
    """
    spec, latent, decode = call.spec, _is_latent(call), _is_decode(call)
    columns, shared, hopper = _columns(call), _shared_memory(call.device), call.device.compute_capability == (9, 0)
    wide, tight = _itemsize(call) == 4, shared < _ROOMY
    assert call.num_tokens is not None
    if decode:
        rows = triton.next_power_of_2(call.num_tokens * spec.group_size)
        block_m = min(max(rows, LEAST_BLOCK), _DECODE_ROWS // 2 if latent and not hopper else _DECODE_ROWS)
        block_n = 32 if wide or tight or columns > 256 or spec.rope_theta is not None else 64
    else:
        block_m = 32 if latent and not hopper else 64 if latent or wide or columns > 256 else 128
        block_n = 64 if hopper and not wide and columns <= 256 else 32
    if latent and tight:
        block_n = 16
    warps = 4 if block_m * parts_of(spec.value_dim).blocks[0] <= _ROWS_OF_FOUR_WARPS else 8
    room, most = (shared if tight or not decode else shared // 2), _MOST_AHEAD if decode else 2
    for ahead in range(most, 1, -1):
        if _bytes(call, Arrangement(block_m, block_n, ahead, warps)) <= room:
            return Arrangement(block_m, block_n, ahead, warps)
    return Arrangement(block_m, block_n, 1, warps)


def arrangements(call: AttentionCall) -> list[Arrangement]:
    """All that fit, for a search."""
    rule = by_rule(call)
    rows = (rule.block_m,) if _is_decode(call) else (64, 128)
    every = (
        Arrangement(block_m, block_n, ahead, warps)
        for block_m in rows
        for block_n in (16, 32, 64, 128)
        for ahead in (1, 2, 3, 4)
        for warps in (4, 8)
    )
    return [one for one in every if one == rule or _bytes(call, one) <= _shared_memory(call.device)]


def _bytes(call: AttentionCall, sizes: Arrangement) -> int:
    """Shared memory of a program, about."""
    itemsize, columns = _itemsize(call), _columns(call)
    queries = sizes.block_m * (columns if _is_latent(call) else columns // 2) * max(itemsize, 2)
    return sizes.block_n * columns * itemsize * sizes.ahead + queries + _OTHER_BYTES


def _columns(call: AttentionCall) -> int:
    """Numbers that a key takes in shared memory, with its value."""
    latent = _is_latent(call)
    key, value = row_numbers(call.spec, latent=latent)
    parts = (key,) if latent else (key, value)
    return sum(
        block for part in parts for block, width in zip(part.blocks, (part.first, part.second), strict=True) if width
    )


def _itemsize(call: AttentionCall) -> int:
    return 1 if call.kv_dtype.startswith("float8") else 4 if call.kv_dtype == "float32" else 2


def _is_latent(call: AttentionCall) -> bool:
    return call.operation.startswith("mla")


def _is_decode(call: AttentionCall) -> bool:
    return call.operation.endswith("decode")


def _shared_memory(device: Device) -> int:
    return SHARED_MEMORY[device.compute_capability or (8, 0)]
