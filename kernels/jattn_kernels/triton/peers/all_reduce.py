"""The sum of an array over the GPUs of a host, and each one's array on all of them.

program (block)     some pieces of 16 bytes, a round of exchanges after another where they do not fit a lane
    one shot        each device stores its pieces into all others' inboxes, and adds up what it gets
    two shots       each device adds up its share of the pieces, and stores the sums into all others' inboxes

Sums are made in float32 in the order of the devices and rounded once: all devices hold the same bits, and a row's do
not depend on how many rows there are.
"""

import dataclasses
from typing import Any, Literal, no_type_check

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Shaped, UInt32

from jattn_kernels.inbox import MOST_BLOCKS, PIECE_BYTES, PIECE_WORDS, Inbox
from jattn_kernels.triton.launch import launch
from jattn_kernels.triton.peers.exchange import (
    Exchange,
    begun,
    ended,
    exchange_of,
    fence,
    lane_of,
    load,
    patience,
    receive,
    send,
    send_to_all,
    sendable,
    slot_at,
    store,
    taking_part,
    tile_of,
    warps_of,
)
from jattn_kernels.triton.peers.numbers import summed

# Bytes up to which more than two devices send everything to everybody: an exchange less, and more to store.
_ONE_SHOT_BYTES = 256 * 1024
_MOST_TILE = 1024  # pieces of a block at a time: two a thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class PiecesConfig:
    """Constants of a kernel over pieces.

    Attributes:
        exchange: Those of its exchanges.
        pieces: Of 16 bytes, of the array; of two shots, of a device's share of it.
        whole: Pieces of the whole array.
        tile: Pieces of a block at a time, a power of two.
        tiles: Of an exchange: all are sent before one is waited for.
        rounds: Exchanges of a block.
        threads: Of a block.
    """

    exchange: Exchange
    pieces: int
    whole: int
    tile: int
    tiles: int
    rounds: int
    threads: int


def all_reduce(
    x: Shaped[Array, " N"],
    table: UInt32[Array, " columns"],
    inbox: Inbox,
    *,
    shots: Literal[1, 2] | None = None,
) -> Shaped[Array, " N"]:
    """The sum over the devices of arrays of a multiple of 16 bytes.

    Args:
        table: This device's row of `Inbox.table`.
        shots: None for what is faster.
    """
    if shots is None:
        shots = 1 if inbox.devices == 2 or x.nbytes <= _ONE_SHOT_BYTES else 2
    whole = x.nbytes // PIECE_BYTES
    pieces = whole if shots == 1 else triton.cdiv(whole, inbox.devices)
    kernel = sum_in_one_shot if shots == 1 else sum_in_two_shots
    return _launched(kernel, x, table, inbox, pieces, whole, jax.ShapeDtypeStruct(x.shape, x.dtype))


def all_gather(x: Shaped[Array, " N"], table: UInt32[Array, " columns"], inbox: Inbox) -> Shaped[Array, "devices N"]:
    """The arrays of all devices, each of a multiple of 16 bytes."""
    pieces = x.nbytes // PIECE_BYTES
    out_type = jax.ShapeDtypeStruct((inbox.devices, *x.shape), x.dtype)
    return _launched(gather, x, table, inbox, pieces, pieces, out_type)


def _launched(kernel: Any, x: Any, table: Any, inbox: Inbox, pieces: int, whole: int, out_type: Any) -> Any:
    lane = inbox.lane_words // PIECE_WORDS
    tile = min(tile_of(triton.cdiv(pieces, MOST_BLOCKS)), lane, _MOST_TILE)
    blocks = min(triton.cdiv(pieces, tile), MOST_BLOCKS)
    tiles = min(triton.cdiv(pieces, blocks * tile), lane // tile)
    warps = warps_of(tile)
    config = PiecesConfig(
        exchange=exchange_of(inbox, x),
        pieces=pieces,
        whole=whole,
        tile=tile,
        tiles=tiles,
        rounds=triton.cdiv(pieces, blocks * tile * tiles),
        threads=32 * warps,
    )
    (out,) = launch(kernel, x, table, config=config, grid=blocks, out_type=[out_type], warps=warps)
    return out


@triton.jit
@no_type_check
def sum_in_one_shot(x_ptr, table_ptr, out_ptr, C: tl.constexpr):
    E: tl.constexpr = C.exchange
    own, others, rank, calls, polls = begun(table_ptr, E)
    for number in range(C.rounds):
        slot = slot_at(calls + number, E)
        send_tiles(x_ptr, others, slot, number, C)
        for tile in range(C.tiles):
            piece = tile * C.tile + tl.arange(0, C.tile)
            place = first_place(number, C) + piece
            inside = place < C.pieces
            mine = sendable(load(x_ptr, place, inside, E), E)
            exchanged = taking_part(inside, piece >= 0, C.rounds)
            total = summed(own, slot, rank, piece, mine, exchanged, polls, E)
            store(out_ptr, place, total, inside, E)
            if C.rounds * C.tiles > 1:
                polls = patience(own, E)
        if C.rounds > 1:
            fence(C.threads, E)
    ended(own, calls + C.rounds, E)


@triton.jit
@no_type_check
def sum_in_two_shots(x_ptr, table_ptr, out_ptr, C: tl.constexpr):
    E: tl.constexpr = C.exchange
    devices: tl.constexpr = C.exchange.devices
    own, others, rank, calls, polls = begun(table_ptr, E)
    second = (E.devices - 1) * E.lane_words  # where the lanes of sums begin
    for number in range(C.rounds):
        slot = slot_at(calls + number, E)
        for tile in range(C.tiles):
            piece = tile * C.tile + tl.arange(0, C.tile)
            within = first_place(number, C) + piece
            for distance in tl.static_range(1, devices):
                place = within + ((rank + distance) % E.devices) * C.pieces
                inside = (within < C.pieces) & (place < C.whole)
                words = sendable(load(x_ptr, place, inside, E), E)
                send(others[distance - 1] + slot, piece, words, taking_part(inside, piece >= 0, C.rounds), E)
        for tile in range(C.tiles):
            piece = tile * C.tile + tl.arange(0, C.tile)
            within = first_place(number, C) + piece
            place = within + rank * C.pieces
            inside = (within < C.pieces) & (place < C.whole)
            mine = sendable(load(x_ptr, place, inside, E), E)
            exchanged = taking_part(inside, piece >= 0, C.rounds)
            total = sendable(summed(own, slot, rank, piece, mine, exchanged, polls, E), E)
            store(out_ptr, place, total, inside, E)
            send_to_all(others, slot + second, piece, total, exchanged, E)
            if C.rounds * C.tiles > 1:
                polls = patience(own, E)
        for tile in range(C.tiles):
            piece = tile * C.tile + tl.arange(0, C.tile)
            within = first_place(number, C) + piece
            for device in tl.static_range(devices):
                place = within + device * C.pieces
                inside = (within < C.pieces) & (place < C.whole) & (rank != device)
                lane = slot + second + lane_of(device, rank, E)
                awaited = taking_part(inside, piece >= 0, C.rounds) & (rank != device)
                store(out_ptr, place, receive(own, lane, piece, awaited, polls, E), inside, E)
            if C.rounds * C.tiles > 1:
                polls = patience(own, E)
        if C.rounds > 1:
            fence(C.threads, E)
    ended(own, calls + C.rounds, E)


@triton.jit
@no_type_check
def gather(x_ptr, table_ptr, out_ptr, C: tl.constexpr):
    E: tl.constexpr = C.exchange
    devices: tl.constexpr = C.exchange.devices
    own, others, rank, calls, polls = begun(table_ptr, E)
    for number in range(C.rounds):
        slot = slot_at(calls + number, E)
        send_tiles(x_ptr, others, slot, number, C)
        for tile in range(C.tiles):
            piece = tile * C.tile + tl.arange(0, C.tile)
            place = first_place(number, C) + piece
            inside = place < C.pieces
            store(out_ptr, place + rank * C.pieces, sendable(load(x_ptr, place, inside, E), E), inside, E)
            for device in tl.static_range(devices):
                awaited = taking_part(inside, piece >= 0, C.rounds) & (rank != device)
                words = receive(own, slot + lane_of(device, rank, E), piece, awaited, polls, E)
                store(out_ptr, place + device * C.pieces, words, inside & (rank != device), E)
            if C.rounds * C.tiles > 1:
                polls = patience(own, E)
        if C.rounds > 1:
            fence(C.threads, E)
    ended(own, calls + C.rounds, E)


@triton.jit
@no_type_check
def send_tiles(x_ptr, others, slot, number, C: tl.constexpr):
    """Sends this block's pieces of an exchange to all others."""
    E: tl.constexpr = C.exchange
    for tile in range(C.tiles):
        piece = tile * C.tile + tl.arange(0, C.tile)
        place = first_place(number, C) + piece
        inside = place < C.pieces
        mine = sendable(load(x_ptr, place, inside, E), E)
        send_to_all(others, slot, piece, mine, taking_part(inside, piece >= 0, C.rounds), E)


@triton.jit
@no_type_check
def first_place(number, C: tl.constexpr):
    """Of this block's pieces of an exchange."""
    return (number * tl.num_programs(0) + tl.program_id(0)) * (C.tiles * C.tile)
