"""Words of 32 bits as the numbers that they are: two of 16 bits, or one."""

from typing import no_type_check

import triton
import triton.language as tl

from jattn_kernels.triton.peers.exchange import lane_of, receive


@triton.jit
@no_type_check
def wide(word, E: tl.constexpr):
    """A word's numbers in float32, the one in the low bits first; the second is 0 where there is one."""
    if E.bits == 32:
        first = word.to(tl.float32, bitcast=True)
        return first, tl.zeros(word.shape, tl.float32)
    low, high = (word & 0xFFFF).to(tl.uint16), (word >> 16).to(tl.uint16)
    if E.dtype == "bfloat16":
        low, high = low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)
    else:
        low, high = low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
@no_type_check
def narrow(first, second, E: tl.constexpr):
    """The word of numbers in float32, each rounded once."""
    if E.bits == 32:
        return first.to(tl.uint32, bitcast=True)
    if E.dtype == "bfloat16":
        low, high = first.to(tl.bfloat16), second.to(tl.bfloat16)
    else:
        low, high = first.to(tl.float16), second.to(tl.float16)
    low, high = low.to(tl.uint16, bitcast=True).to(tl.uint32), high.to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high << 16)


@triton.jit
@no_type_check
def added(sums, words, E: tl.constexpr):
    """Sums of a piece's numbers in float32, with the numbers of four words more."""
    a0, a1 = wide(words[0], E)
    b0, b1 = wide(words[1], E)
    c0, c1 = wide(words[2], E)
    d0, d1 = wide(words[3], E)
    return (
        sums[0] + a0,
        sums[1] + a1,
        sums[2] + b0,
        sums[3] + b1,
        sums[4] + c0,
        sums[5] + c1,
        sums[6] + d0,
        sums[7] + d1,
    )


@triton.jit
@no_type_check
def rounded(sums, E: tl.constexpr):
    """The four words of a piece's sums."""
    return (
        narrow(sums[0], sums[1], E),
        narrow(sums[2], sums[3], E),
        narrow(sums[4], sums[5], E),
        narrow(sums[6], sums[7], E),
    )


@triton.jit
@no_type_check
def nothing(piece):
    """Sums to begin with."""
    zero = tl.zeros(piece.shape, tl.float32)
    return zero, zero, zero, zero, zero, zero, zero, zero


@triton.jit
@no_type_check
def chosen(condition, words, others):
    """The first four words where the condition holds, and the others elsewhere."""
    return (
        tl.where(condition, words[0], others[0]),
        tl.where(condition, words[1], others[1]),
        tl.where(condition, words[2], others[2]),
        tl.where(condition, words[3], others[3]),
    )


@triton.jit
@no_type_check
def summed(own, slot, rank, piece, mine, mask, polls, E: tl.constexpr):
    """The four words of each piece's sum over the devices, made in float32 in their order."""
    devices: tl.constexpr = E.devices
    sums = nothing(piece)
    for device in tl.static_range(devices):
        theirs = receive(own, slot + lane_of(device, rank, E), piece, mask & (rank != device), polls, E)
        sums = added(sums, chosen(rank == device, mine, theirs), E)
    return rounded(sums, E)
