"""One exchange of a block with the same block of the other devices: what it stores, and how it waits.

A thread stores 16 bytes at a time straight into the others' inboxes, waits until its own holds theirs, and makes it
empty again. What is stored is its own flag: there is no barrier and no fence. Two slots are enough: another device
stores into a slot again two exchanges later, which it gets to only after this device's next one; and that begins after
this one has ended, stores that empty included, as kernels run one after another. Within a kernel a fence says so, and
each thread takes part in all of its exchanges, with anything where an array has ended: else another device could be an
exchange ahead of a thread that it heard nothing from.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jattn_kernels.inbox import EMPTY, FAILED, HEADER, Inbox
from jattn_kernels.triton.launch import is_interpreting

_POLLS = 1 << 23  # some 5 s
_LEAST_TILE, _MOST_WARPS = 128, 16
_INSTEAD = {2: 0, 4: EMPTY ^ 1}  # of the word EMPTY, by the bytes of a number: +0.0, or a number next to it
_empty, _failed, _header = tl.constexpr(EMPTY), tl.constexpr(FAILED), tl.constexpr(HEADER)
_TO_ITSELF, _TO_ANOTHER = tl.constexpr("st.global"), tl.constexpr("st.relaxed.sys.global")  # by whose memory it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Constants of an exchange.

    Attributes:
        devices, lanes, lane_words: As of the Inbox.
        dtype: Name of the numbers' dtype.
        bits: Of a number.
        instead: What is stored in place of the word that says empty.
        polls: How often a thread looks before it gives up: then its words are all ones, which is NaN.
        interpreted: Whether Triton's interpreter runs it, which knows no PTX.
    """

    devices: int
    lanes: int
    lane_words: int
    dtype: str
    bits: int
    instead: int
    polls: int
    interpreted: bool


def exchange_of(inbox: Inbox, x: jax.Array | jax.ShapeDtypeStruct) -> Exchange:
    """The constants for numbers of x's dtype, or words of 32 bits of another."""
    dtype = jnp.dtype(x.dtype)
    return Exchange(
        devices=inbox.devices,
        lanes=inbox.lanes,
        lane_words=inbox.lane_words,
        dtype=dtype.name,
        bits=8 * dtype.itemsize,
        instead=_INSTEAD[dtype.itemsize],
        polls=_POLLS,
        interpreted=is_interpreting(),
    )


def tile_of(pieces: int) -> int:
    """The power of two of threads' places that so many pieces take: never fewer than a block has threads.

    Triton would have two threads do the same piece, and the one that comes second wait in vain.
    """
    return max(triton.next_power_of_2(pieces), _LEAST_TILE)


def warps_of(tile: int) -> int:
    """Of a block: a piece a thread, if not too many."""
    return min(tile // 32, _MOST_WARPS)


@triton.jit
@no_type_check
def inbox_at(table_ptr, number, E: tl.constexpr):
    """The address that stands at this place of a row of the table."""
    low = kept(table_ptr + 2 * number, E).to(tl.uint64)
    high = kept(table_ptr + 2 * number + 1, E).to(tl.uint64)
    return (low | (high << 32)).to(tl.pointer_type(tl.uint32))


@triton.jit
@no_type_check
def kept(pointer, E: tl.constexpr):
    """A word that is to stay in L2 while weights go through it: each exchange begins with it."""
    if E.interpreted:
        return tl.load(pointer, volatile=True)
    return tl.inline_asm_elementwise(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
        " ld.relaxed.gpu.global.L2::cache_hint.b32 $0, [$1], policy; }",
        "=r,l",
        [pointer],
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )


@triton.jit
@no_type_check
def begun(table_ptr, E: tl.constexpr):
    """What an exchange begins with.

    The own inbox, the device's lanes in the others', its number, how many exchanges this block has done, and how often
    to look for what is to come.
    """
    own = inbox_at(table_ptr, 0, E)
    calls = kept(own + tl.program_id(0), E)
    polls = patience(own, E)
    devices: tl.constexpr = E.devices
    others = (inbox_at(table_ptr, 1, E),)
    for distance in tl.static_range(2, devices):
        others = others + (inbox_at(table_ptr, distance, E),)  # noqa: RUF005, which Triton does not know
    rank = kept(table_ptr + 2 * E.devices, E).to(tl.int32)
    return own, others, rank, calls, polls


@triton.jit
@no_type_check
def patience(own, E: tl.constexpr):
    """How often to look for what is to come: once, if any block has given up."""
    return tl.where(kept(own + _failed, E) == 0, E.polls, 1)


@triton.jit
@no_type_check
def ended(own, calls, E: tl.constexpr):
    """Says that this block has done so many exchanges."""
    if not E.interpreted:
        tl.debug_barrier()  # all threads have read how many there were
    tl.store(own + tl.program_id(0), calls)


@triton.jit
@no_type_check
def slot_at(calls, E: tl.constexpr):
    """Where this block's slot for its next exchange begins, in words."""
    slot = tl.program_id(0) * 2 + (calls % 2).to(tl.int32)
    return _header + slot.to(tl.int64) * (E.lanes * E.lane_words)


@triton.jit
@no_type_check
def lane_of(device, rank, E: tl.constexpr):
    """Where another device's lane begins in a slot, in words (`Inbox.lane`)."""
    return (device - (device > rank).to(tl.int32)) * E.lane_words


@triton.jit
@no_type_check
def load(pointer, piece, mask, E: tl.constexpr):
    """The four words of each piece; whatever where it is masked."""
    at = pointer.to(tl.pointer_type(tl.uint32)) + tl.where(mask, piece, 0).to(tl.int64) * 4
    if E.interpreted:
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return tl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [at],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit
@no_type_check
def store(pointer, piece, words, mask, E: tl.constexpr):
    """Stores four words of each piece."""
    _store(pointer.to(tl.pointer_type(tl.uint32)) + piece.to(tl.int64) * 4, words, mask, _TO_ITSELF, E)


@triton.jit
@no_type_check
def send_to_all(others, slot, piece, words, mask, E: tl.constexpr):
    """Stores four words of each piece into the device's lane in each of the others' inboxes."""
    devices: tl.constexpr = E.devices
    for distance in tl.static_range(1, devices):
        send(others[distance - 1] + slot, piece, words, mask, E)


@triton.jit
@no_type_check
def send(inbox, piece, words, mask, E: tl.constexpr):
    """Stores four words of each piece into another device's lane."""
    _store(inbox + piece * 4, words, mask, _TO_ANOTHER, E)


@triton.jit
@no_type_check
def _store(at, words, mask, how: tl.constexpr, E: tl.constexpr):
    if E.interpreted:
        for i in tl.static_range(4):
            tl.store(at + i, words[i], mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred inside; setp.ne.s32 inside, $6, 0; @inside " + how + ".v4.b32 [$1], {$2, $3, $4, $5};"
            " mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r",
            [at, words[0], words[1], words[2], words[3], mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
@no_type_check
def sendable(words, E: tl.constexpr):
    """The words, none of which says empty."""
    a, b, c, d = words
    return _sendable(a, E), _sendable(b, E), _sendable(c, E), _sendable(d, E)


@triton.jit
@no_type_check
def _sendable(word, E: tl.constexpr):
    return tl.where(word == _empty, tl.full(word.shape, E.instead, tl.uint32), word)


@triton.jit
@no_type_check
def taking_part(inside, always, rounds: tl.constexpr):
    """Which pieces are exchanged: of several exchanges all in each, as a thread must hear from the others in each."""
    if rounds > 1:
        return always
    return inside


@triton.jit
@no_type_check
def receive(own, lane, piece, mask, polls, E: tl.constexpr):
    """Waits for four words of each piece in a lane of the own inbox, and makes it empty again."""
    at = own + lane + piece * 4
    if E.interpreted:
        a, b, c, d = _look(at, mask)
        while tl.max((mask & ((a == _empty) | (b == _empty) | (c == _empty) | (d == _empty))).to(tl.int32), axis=0):
            a, b, c, d = _look(at, mask)
        for i in tl.static_range(4):
            tl.store(at + i, tl.full(piece.shape, _empty, tl.uint32), mask=mask)
        return a, b, c, d
    failed = own + _failed + tl.zeros(piece.shape, tl.int32)
    limit = polls + tl.zeros(piece.shape, tl.int32)
    return tl.inline_asm_elementwise(
        """{
        .reg .pred inside, empty, again;
        .reg .s32 polls;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        setp.ne.s32 inside, $7, 0;
        @!inside bra DONE;
        mov.s32 polls, 0;
        LOOK:
        ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
        setp.eq.u32 empty, $0, 2147516416;
        setp.eq.or.u32 empty, $1, 2147516416, empty;
        setp.eq.or.u32 empty, $2, 2147516416, empty;
        setp.eq.or.u32 empty, $3, 2147516416, empty;
        add.s32 polls, polls, 1;
        setp.lt.and.s32 again, polls, $6, empty;
        @again bra LOOK;
        @!empty bra ARRIVED;
        st.relaxed.sys.global.b32 [$5], 1;
        mov.b32 $0, -1;
        mov.b32 $1, -1;
        mov.b32 $2, -1;
        mov.b32 $3, -1;
        bra DONE;
        ARRIVED:
        st.global.v4.b32 [$4], {2147516416, 2147516416, 2147516416, 2147516416};
        DONE:
        }""",
        "=&r,=&r,=&r,=&r,l,l,r,r",
        [at, failed, limit, mask.to(tl.int32)],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit
@no_type_check
def _look(at, mask):
    a = tl.load(at, mask=mask, other=0, volatile=True)
    b = tl.load(at + 1, mask=mask, other=0, volatile=True)
    c = tl.load(at + 2, mask=mask, other=0, volatile=True)
    d = tl.load(at + 3, mask=mask, other=0, volatile=True)
    return a, b, c, d


@triton.jit
@no_type_check
def fence(threads: tl.constexpr, E: tl.constexpr):
    """Between two exchanges of a kernel: what is emptied in one is so before the next one's words are seen."""
    if not E.interpreted:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, 0;", "=r,r", [tl.arange(0, threads)], dtype=tl.int32, is_pure=False, pack=1
        )
