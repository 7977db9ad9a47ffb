"""What the GPUs of a host add to the residual stream, and the norm of that, in one kernel.

program (block)     a row, or several: it stores its parts of as many as a lane holds into the others' inboxes, and then
                    adds up and norms one after the other

What each device adds may come in splits of a product, which are added up as they are read. All but the others' part of
a row is asked for before that is waited for.
"""

import dataclasses
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, UInt32

from jattn_kernels.call import NormCall
from jattn_kernels.inbox import MOST_BLOCKS, PIECE_BYTES, PIECE_WORDS, Inbox
from jattn_kernels.operands import NormOperands
from jattn_kernels.splits import Splits
from jattn_kernels.triton.launch import launch
from jattn_kernels.triton.peers.exchange import (
    Exchange,
    begun,
    ended,
    exchange_of,
    fence,
    load,
    patience,
    send_to_all,
    sendable,
    slot_at,
    store,
    taking_part,
    tile_of,
    warps_of,
)
from jattn_kernels.triton.peers.numbers import added, nothing, rounded, summed, wide


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddNormConfig:
    """Constants of the kernel.

    Attributes:
        exchange, wide: Those of its exchanges, and of splits, which are float32.
        rows, columns: Of the residual stream.
        pieces: Of 16 bytes, of a row.
        tile: The power of two that they fit.
        splits: Of what a device adds; 0 if it is added up already.
        split_pieces: Pieces of one of them.
        rows_at_once: Of a block, in an exchange.
        rounds: Exchanges of a block.
        threads: Of a block.
        eps, offset: As of `rms_norm`.
    """

    exchange: Exchange
    wide: Exchange
    rows: int
    columns: int
    pieces: int
    tile: int
    splits: int
    split_pieces: int
    rows_at_once: int
    rounds: int
    threads: int
    eps: float
    offset: float


def fits(columns: int, dtype: Any, inbox: Inbox) -> bool:
    """Whether there is a kernel for rows of so many numbers."""
    row_bytes = columns * jnp.dtype(dtype).itemsize
    return row_bytes % PIECE_BYTES == 0 and PIECE_WORDS * tile_of(row_bytes // PIECE_BYTES) <= inbox.lane_words


def add_norm(
    call: NormCall,
    operands: NormOperands,
    addition: Float[Array, "T D"] | Splits,
    table: UInt32[Array, " columns"],
    inbox: Inbox,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """x and the sum over the devices of what they add to it, and the norm of that.

    Args:
        operands: Their scale has x's dtype.
        table: This device's row of `Inbox.table`.
    """
    x = operands.x
    exchange = exchange_of(inbox, x)
    pieces = x.shape[1] * x.dtype.itemsize // PIECE_BYTES
    tile = tile_of(pieces)
    blocks = min(len(x), MOST_BLOCKS)
    rows_at_once = min(triton.cdiv(len(x), blocks), inbox.lane_words // (PIECE_WORDS * tile))
    warps = warps_of(tile)
    in_splits = isinstance(addition, Splits)
    parts = addition.parts.astype(jnp.float32) if isinstance(addition, Splits) else addition
    config = AddNormConfig(
        exchange=exchange,
        wide=exchange_of(inbox, jax.ShapeDtypeStruct((), jnp.float32)),
        rows=x.shape[0],
        columns=x.shape[1],
        pieces=pieces,
        tile=tile,
        splits=len(parts) if in_splits else 0,
        split_pieces=parts[0].size // PIECE_WORDS if in_splits else 0,
        rows_at_once=rows_at_once,
        rounds=triton.cdiv(len(x), blocks * rows_at_once),
        threads=32 * warps,
        eps=float(call.eps),
        offset=float(call.offset),
    )
    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = launch(
        add_norm_rows,
        x,
        parts,
        operands.scale,
        operands.layer_index.reshape(1),
        table,
        config=config,
        grid=blocks,
        out_type=[out_type, out_type],
        warps=warps,
    )
    return total, normed


@triton.jit
@no_type_check
def add_norm_rows(
    x_ptr,  # [T, D]
    parts_ptr,  # [T, D], or float32 [S, R, D]
    scale_ptr,  # [L, D]
    layer_ptr,  # int32 [1]
    table_ptr,
    total_ptr,  # [T, D]
    normed_ptr,  # [T, D]
    C: tl.constexpr,  # AddNormConfig
):
    E: tl.constexpr = C.exchange
    own, others, rank, calls, polls = begun(table_ptr, E)
    piece = tl.arange(0, C.tile)
    within = piece < C.pieces
    scale = load(scale_ptr, tl.load(layer_ptr) * C.pieces + piece, within, E)
    for number in range(C.rounds):
        slot = slot_at(calls + number, E)
        first = (number * tl.num_programs(0) + tl.program_id(0)) * C.rows_at_once
        if C.rows_at_once > 1:
            for i in range(C.rows_at_once):
                inside = within & (first + i < C.rows)
                mine = _part(parts_ptr, (first + i) * C.pieces + piece, inside, C)
                send_to_all(others, slot, i * C.tile + piece, mine, taking_part(inside, within, C.rounds), E)
        for i in range(C.rows_at_once):
            inside = within & (first + i < C.rows)
            place = (first + i) * C.pieces + piece
            before = load(x_ptr, place, inside, E)
            mine = _part(parts_ptr, place, inside, C)
            exchanged = taking_part(inside, within, C.rounds)
            if C.rows_at_once == 1:
                send_to_all(others, slot, piece, mine, exchanged, E)
            addition = summed(own, slot, rank, i * C.tile + piece, mine, exchanged, polls, E)
            words = rounded(added(added(nothing(piece), addition, E), before, E), E)
            store(total_ptr, place, words, inside, E)
            numbers = added(nothing(piece), words, E)
            squares = numbers[0] * numbers[0]
            for j in tl.static_range(1, 8):
                squares += numbers[j] * numbers[j]
            root = tl.rsqrt(tl.sum(tl.where(inside, squares, 0.0)) / C.columns + C.eps)
            store(normed_ptr, place, rounded(_scaled(numbers, root, scale, C), E), inside, E)
            if C.rounds * C.rows_at_once > 1:
                polls = patience(own, E)
        if C.rounds > 1:
            fence(C.threads, E)
    ended(own, calls + C.rounds, E)


@triton.jit
@no_type_check
def _part(parts_ptr, place, inside, C: tl.constexpr):
    """What this device adds to each piece, as it sends it."""
    E: tl.constexpr = C.exchange
    if C.splits > 0:
        words = _summed(parts_ptr, place, inside, C)
    else:
        words = load(parts_ptr, place, inside, E)
    return sendable(words, E)


@triton.jit
@no_type_check
def _summed(parts_ptr, place, inside, C: tl.constexpr):
    """What the splits of each piece add up to, in the rows' dtype."""
    E: tl.constexpr = C.exchange
    W: tl.constexpr = C.wide
    splits: tl.constexpr = C.splits
    sums = nothing(place)
    for split in tl.static_range(splits):
        if E.bits == 32:
            words = load(parts_ptr, split * C.split_pieces + place, inside, W)
            sums = added(sums, words, W)
        else:
            first = load(parts_ptr, split * C.split_pieces + 2 * place, inside, W)
            second = load(parts_ptr, split * C.split_pieces + 2 * place + 1, inside, W)
            sums = (
                sums[0] + first[0].to(tl.float32, bitcast=True),
                sums[1] + first[1].to(tl.float32, bitcast=True),
                sums[2] + first[2].to(tl.float32, bitcast=True),
                sums[3] + first[3].to(tl.float32, bitcast=True),
                sums[4] + second[0].to(tl.float32, bitcast=True),
                sums[5] + second[1].to(tl.float32, bitcast=True),
                sums[6] + second[2].to(tl.float32, bitcast=True),
                sums[7] + second[3].to(tl.float32, bitcast=True),
            )
    return rounded(sums, E)


@triton.jit
@no_type_check
def _scaled(numbers, root, scale, C: tl.constexpr):
    """Numbers of a piece over their row's root mean square, times its scale and the offset."""
    E: tl.constexpr = C.exchange
    a0, a1 = wide(scale[0], E)
    b0, b1 = wide(scale[1], E)
    c0, c1 = wide(scale[2], E)
    d0, d1 = wide(scale[3], E)
    return (
        numbers[0] * root * (a0 + C.offset),
        numbers[1] * root * (a1 + C.offset),
        numbers[2] * root * (b0 + C.offset),
        numbers[3] * root * (b1 + C.offset),
        numbers[4] * root * (c0 + C.offset),
        numbers[5] * root * (c1 + C.offset),
        numbers[6] * root * (d0 + C.offset),
        numbers[7] * root * (d1 + C.offset),
    )
