"""Tile sizes of attention, by what a GPU's shared memory and registers hold, or as a file of `bench.tune` tells."""

import dataclasses
from typing import NamedTuple

import triton

from jattn_kernels.call import AttentionCall, Device
from jattn_kernels.lowering.tile_file import TileFile
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.triton.attention.config import LEAST_BLOCK, Parts, key_parts, parts_of
from jattn_kernels.triton.gpus import SHARED_MEMORY, num_sms

_WARPGROUPS, _WARPGROUP_ROWS = ((9, 0), (10, 0)), 64
_DECODE_ROWS = 64  # rows of a decode tile at most
_ROOMY = 128 * 1024  # bytes of shared memory; desktop GPUs have less
_ROWS_OF_FOUR_WARPS = 32 * 128  # numbers of the accumulator
_OTHER_BYTES = 8 * 1024
_MOST_AHEAD = 3
_MOST_AHEAD_OF_FEW = 4  # tiles, where they are small
_AHEAD_BYTES = 128 * 1024  # that keep an SM's share of the memory busy
_INVARIANT_KEYS = 512  # of a split, where it must not depend on the batch
_LONG_TILE = 64  # keys
_SMS_OF_FEW = 8  # for a sequence of latents, where those are few


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
        at_once: How many of them are worked on at the same time.
        tiles_per_split: Tiles of keys after which sequences are cut, where that must not depend on the batch.
        whole_tiles: Whether tiles that all rows see are worth a loop of their own.
        asks_early: Whether the next tile is asked for before this one's values are multiplied.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    block_tokens: int
    row_blocks: int
    workers: int
    at_once: int
    tiles_per_split: int | None
    whole_tiles: bool
    asks_early: bool


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
    needed, most = _bytes(call, Arrangement(block_m, block_n, ahead, warps)), 8 // warps if _is_latent(call) else 3
    places = num_sms(device) * max(min(_shared_memory(device) // needed, most), 1)
    early = _asks_early(call, Arrangement(block_m, block_n, ahead, warps))
    return AttendTiles(
        block_m=block_m,
        block_n=block_n,
        stages=ahead + (0 if early else 1 if call.page_size is None else 2),
        warps=warps,
        block_tokens=block_tokens,
        row_blocks=row_blocks,
        workers=max(places * _waves(call) // (spec.num_kv_heads * row_blocks), 1),
        at_once=max(places // (spec.num_kv_heads * row_blocks), 1),
        tiles_per_split=max(_INVARIANT_KEYS // block_n, 1) if decode and spec.batch_invariant else None,
        whole_tiles=not decode or (_is_latent(call) and not _is_few(call)),
        asks_early=early,
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
    """The heuristic: tiles that registers hold without spilling, and as many ahead as keep the memory busy.

    Of a device that is no NVIDIA GPU, those of compute capability 8.0.
    """
    return _decode_rule(call) if _is_decode(call) else _extend_rule(call)


def _decode_rule(call: AttentionCall) -> Arrangement:
    """Of few rows, where the memory is what is waited for."""
    spec, latent, shared = call.spec, _is_latent(call), _shared_memory(call.device)
    columns, wide, hopper, tight = _columns(call), _is_wide(call), _is_hopper(call), shared < _ROOMY
    assert call.num_tokens is not None
    rows = triton.next_power_of_2(call.num_tokens * spec.group_size)
    block_m = min(max(rows, LEAST_BLOCK), _DECODE_ROWS // 2 if latent and not hopper else _DECODE_ROWS)
    warps = 4 if block_m * parts_of(spec.value_dim).blocks[0] <= _ROWS_OF_FOUR_WARPS or _is_narrow(call, block_m) else 8
    if latent and tight:
        return _deepest(call, block_m, 16, warps, most=_MOST_AHEAD, room=shared)
    if latent:
        is_deep = hopper and (block_m > LEAST_BLOCK or (_itemsize(call) == 2 and not wide and not _is_few(call)))
        return _deepest(call, block_m, 64 if is_deep else 32, warps, most=2, room=shared)
    if tight or wide or spec.rope_theta is not None:
        block_n = 32 if wide or tight or columns > 256 or spec.rope_theta is not None else 64
        return _deepest(call, block_m, block_n, warps, most=_MOST_AHEAD, room=shared if tight else shared // 2)
    if block_m > 2 * LEAST_BLOCK and hopper:
        return _deepest(call, block_m, 64, 4, most=3, room=shared)
    if not _is_many(call):
        return _deepest(call, block_m, 32, warps, most=_MOST_AHEAD_OF_FEW, room=shared // 2)
    block_n = 256 if columns <= 128 else 128 if columns <= 256 else 64
    ahead = _AHEAD_BYTES // (block_n * columns * _itemsize(call))
    return _deepest(call, block_m, block_n, warps, most=min(max(ahead, 1), _MOST_AHEAD_OF_FEW), room=shared)


def _extend_rule(call: AttentionCall) -> Arrangement:
    """Of many rows, where the products are."""
    latent, columns, wide, hopper = _is_latent(call), _columns(call), _is_wide(call), _is_hopper(call)
    block_m = 32 if latent and not hopper else 64 if latent or wide or columns > 256 else 128
    block_n, most = 64 if hopper and not wide and columns <= 256 else 32, 2
    warps = 4 if block_m * parts_of(call.spec.value_dim).blocks[0] <= _ROWS_OF_FOUR_WARPS else 8
    shared = _shared_memory(call.device)
    if latent and shared < _ROOMY:
        block_n = 16
    elif wide:
        block_m, warps = 32, 4
    elif "custom_mask" in call.features and hopper:
        block_n = 32
    elif latent and hopper:
        block_n = 64 if _itemsize(call) == 2 else 32
    elif hopper and call.spec.rope_theta is None:
        if columns <= 128:
            block_n, warps, most = 128, 4, 3
        elif columns <= 256 and _itemsize(call) == 1:
            warps = 4
        elif columns <= 256:
            most = 5
        else:
            block_m, block_n = 128, 64
    return _deepest(call, block_m, block_n, warps, most=most, room=shared)


def _deepest(call: AttentionCall, block_m: int, block_n: int, warps: int, *, most: int, room: int) -> Arrangement:
    """With as many tiles ahead as there is room for, `most` at most."""
    for ahead in range(most, 1, -1):
        if _bytes(call, Arrangement(block_m, block_n, ahead, warps)) <= room:
            return Arrangement(block_m, block_n, ahead, warps)
    return Arrangement(block_m, block_n, 1, warps)


def _is_narrow(call: AttentionCall, block_m: int) -> bool:
    """Whether four warps hold the accumulator of latents."""
    return _is_latent(call) and block_m == LEAST_BLOCK


def _is_many(call: AttentionCall) -> bool:
    """Whether there are sequences for all of the GPU without cutting them; the same of any batch where that is asked.

    Then a program an SM, with large tiles, reads the most; else small tiles let more programs share the keys.
    """
    assert call.num_seqs is not None
    return call.spec.batch_invariant or call.num_seqs * call.spec.num_kv_heads >= num_sms(call.device)


def _is_few(call: AttentionCall) -> bool:
    """Whether a program has few tiles of latents, so that it is done before a second loop is worth its beginning."""
    assert call.num_seqs is not None
    return not call.spec.batch_invariant and call.num_seqs * _SMS_OF_FEW < num_sms(call.device)


def _waves(call: AttentionCall) -> int:
    """Programs that decode wants for each place on an SM: where sequences are few, the last ones must not be."""
    if _shared_memory(call.device) < _ROOMY:
        return 4
    return 1 if _is_latent(call) or _is_many(call) else 2


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
    # Products of warpgroups read the tile before, still, when the next one comes.
    warpgroups = uses_warpgroups(call.device, sizes.block_m)
    if not _is_latent(call):
        tiles = sizes.ahead + (call.page_size is None and warpgroups)
    elif warpgroups and _asks_early(call, sizes):
        tiles = sizes.ahead
    else:
        tiles = (sizes.ahead + 1) // 2 + warpgroups  # half the stages are those of page numbers
    return sizes.block_n * columns * itemsize * tiles + queries + _OTHER_BYTES


def uses_warpgroups(device: Device, block_m: int) -> bool:
    """Whether products are of four warps together, which take their second operand from shared memory."""
    return device.compute_capability in _WARPGROUPS and block_m >= _WARPGROUP_ROWS


def shares_keys(call: AttentionCall, sizes: AttendTiles | Arrangement) -> bool:
    """Whether a tile of latents has rows for one of several of Hopper's warpgroups, which can share its keys."""
    rows_of_all = LEAST_BLOCK * sizes.warps
    is_for = _is_latent(call) and _is_hopper(call) and _itemsize(call) == 2  # others are not in shared memory as loaded
    return is_for and _WARPGROUP_ROWS <= sizes.block_m < rows_of_all


def _asks_early(call: AttentionCall, sizes: Arrangement) -> bool:
    """Whether a tile of latents is asked for as soon as the one before has its logits, which pays where it is long.

    Triton 3.6 does not compile it for one warpgroup by itself, as latents of up to 64 numbers have.
    """
    is_for = _is_latent(call) and _is_hopper(call) and _itemsize(call) == 2 and not _is_wide(call)
    alone = uses_warpgroups(call.device, sizes.block_m) and not shares_keys(call, sizes)
    return is_for and sizes.block_n >= _LONG_TILE and not alone


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


def _is_wide(call: AttentionCall) -> bool:
    """Whether products are of float32 numbers."""
    return "float32" in (call.q_dtype, call.kv_dtype)


def _is_latent(call: AttentionCall) -> bool:
    return call.operation.startswith("mla")


def _is_decode(call: AttentionCall) -> bool:
    return call.operation.endswith("decode")


def _is_hopper(call: AttentionCall) -> bool:
    return call.device.compute_capability == (9, 0)


def _shared_memory(device: Device) -> int:
    return SHARED_MEMORY[device.compute_capability or (8, 0)]
