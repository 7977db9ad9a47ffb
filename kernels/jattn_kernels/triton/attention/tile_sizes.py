"""Tile sizes of attention, by what a GPU's shared memory and registers hold."""

import dataclasses

import triton

from jattn_kernels.call import AttentionCall, Device
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.triton.attention.config import LEAST_BLOCK, Parts, key_parts, parts_of
from jattn_kernels.triton.gpus import SHARED_MEMORY, num_sms

_DECODE_ROWS = 64  # rows of a decode tile at most
_WAVES = 4  # programs that decode wants for each place on an SM: sequences differ, and the last ones must not be few
_ROOMY = 128 * 1024  # bytes of shared memory; desktop GPUs have less
_ROWS_OF_FOUR_WARPS = 32 * 128  # numbers of the accumulator
_OTHER_BYTES = 8 * 1024
_MOST_AHEAD = 3  # tiles of keys that are on their way
_INVARIANT_KEYS = 512  # of a split, where it must not depend on the batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendTiles:
    """Sizes that the kernel is compiled for.

    Attributes:
        block_m: Rows, which are tokens times the query heads of a group.
        block_n: Keys a tile.
        stages: Of the pipeline: tiles that are loaded ahead, one more that is computed with, and one for page numbers.
        warps: Of a program.
        block_tokens: Tokens of a work tile of extend.
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


def row_numbers(spec: AttentionSpec, *, latent: bool) -> tuple[Parts, Parts]:
    """The parts of keys and of values."""
    value = Parts(spec.value_dim, 0) if latent else parts_of(spec.value_dim)
    return key_parts(spec, latent=latent), value


def choose_tiles(call: AttentionCall) -> AttendTiles:
    """The sizes for a call; of a device that is no NVIDIA GPU, those of compute capability 8.0."""
    latent, decode = call.operation.startswith("mla"), call.operation.endswith("decode")
    spec, device = call.spec, call.device
    columns = _columns(spec, latent=latent)
    wide, shared = call.kv_dtype == "float32", _shared_memory(device)
    tight, hopper = shared < _ROOMY, device.compute_capability == (9, 0)
    assert call.num_tokens is not None
    if decode:
        rows = call.num_tokens * spec.group_size
        most = _DECODE_ROWS // 2 if latent and not hopper else _DECODE_ROWS
        block_m = min(max(triton.next_power_of_2(rows), LEAST_BLOCK), most)
        block_tokens, row_blocks = call.num_tokens, -(-rows // block_m)
        block_n = 32 if wide or tight or columns > 256 or spec.rope_theta is not None else 64
    else:
        block_m = 32 if latent and not hopper else 64 if latent or wide or columns > 256 else 128
        block_tokens = max(block_m // spec.group_size, 1)
        row_blocks = -(-block_tokens * spec.group_size // block_m)
        block_n = 64 if hopper and not wide and columns <= 256 else 32
    if latent and tight:
        block_n = 16
    warps = 4 if block_m * parts_of(spec.value_dim).blocks[0] <= _ROWS_OF_FOUR_WARPS else 8
    bytes_of_tile = block_n * columns * (4 if wide else 2)
    queries = block_m * columns * (4 if wide else 2) if latent else block_m * columns
    room = (shared if tight or not decode else shared // 2) - queries - _OTHER_BYTES
    ahead = max(min(room // bytes_of_tile, _MOST_AHEAD if decode else 2), 1)
    blocks_per_sm = max(min(shared // (bytes_of_tile * ahead + queries), 3), 1)
    workers = max(num_sms(device) * blocks_per_sm * _WAVES // (spec.num_kv_heads * row_blocks), 1)
    return AttendTiles(
        block_m=block_m,
        block_n=block_n,
        stages=ahead + (1 if call.page_size is None else 2),
        warps=warps,
        block_tokens=block_tokens,
        row_blocks=row_blocks,
        workers=workers,
        tiles_per_split=_INVARIANT_KEYS // block_n if decode and spec.batch_invariant else None,
    )


def _columns(spec: AttentionSpec, *, latent: bool) -> int:
    """Numbers that a key takes in shared memory, with its value."""
    key, value = row_numbers(spec, latent=latent)
    parts = (key,) if latent else (key, value)
    return sum(
        block for part in parts for block, width in zip(part.blocks, (part.first, part.second), strict=True) if width
    )


def _shared_memory(device: Device) -> int:
    return SHARED_MEMORY[device.compute_capability or (8, 0)]
