"""Exchanges between the GPUs of one host, each of which runs the same program: sums, norms of sums, gathers.

Each device calls with its own arrays and its own row of `Inbox.table`, inside `jax.shard_map`. Exchanges of a program
must depend on one another, and all devices must run the same programs in the same order.
"""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt32

from jattn_kernels.inbox import PIECE_BYTES, Inbox
from jattn_kernels.norm import packed_norm, rms_norm
from jattn_kernels.shapes.arrays import check_are_arrays
from jattn_kernels.splits import Splits, added

_SUMMED = ("float32", "bfloat16", "float16")
# Bytes that NVLink takes in as long as a sum of two shots and a norm take longer, by the times of two devices: 6 us.
_MOST_STORED_MORE = 2_500_000


def all_reduce(x: Float[Array, "..."], table: UInt32[Array, " columns"], *, inbox: Inbox) -> Float[Array, "..."]:
    """The sum over the devices: in float32, in their order, rounded once; all get the same bits.

    A sum that waits in vain for another device, some seconds, is NaN, as are all that follow (`FAILED` in the inbox).

    Raises:
        ValueError: A dtype or shape is wrong.
    """
    from jattn_kernels.triton.peers.all_reduce import all_reduce as summed

    _check(x, table, inbox)
    if x.dtype.name not in _SUMMED:
        raise ValueError(f"`x` must be one of {', '.join(_SUMMED)}. Got x.dtype={x.dtype}.")
    return summed(_in_pieces(x), table, inbox)[: x.size].reshape(x.shape)


def all_gather(
    x: Shaped[Array, "..."], table: UInt32[Array, " columns"], *, inbox: Inbox
) -> Shaped[Array, "devices ..."]:
    """The devices' arrays of numbers of 32 bits.

    One float32 does not survive: -4.6e-41 (0x80008000) becomes the number next to it.

    Raises:
        ValueError: A dtype or shape is wrong.
    """
    from jattn_kernels.triton.peers.all_reduce import all_gather as gathered

    _check(x, table, inbox)
    if x.dtype.itemsize != 4:
        raise ValueError(f"`x` must have numbers of 32 bits. Got x.dtype={x.dtype}.")
    return gathered(_in_pieces(x), table, inbox)[:, : x.size].reshape(inbox.devices, *x.shape)


def all_reduce_add_norm(
    x: Float[Array, "T D"],
    addition: Float[Array, "T D"] | Splits,
    scale: Float[Array, "..."],
    table: UInt32[Array, " columns"],
    *,
    inbox: Inbox,
    eps: float,
    offset: float = 0.0,
    layer_index: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """x and the sum over the devices of what they add to it, and the `rms_norm` of that; one kernel where it fits.

    Args:
        x: The same on all devices.

    Raises:
        ValueError: A dtype or shape is wrong.
    """
    from jattn_kernels.triton.peers.add_norm import add_norm, fits

    _check(x, table, inbox)
    if x.ndim != 2 or addition.shape != x.shape or addition.dtype != x.dtype:
        raise ValueError(
            "`x` and `addition` must be [T, D] of one dtype. "
            f"Got x.shape={x.shape} of {x.dtype}, addition.shape={addition.shape} of {addition.dtype}."
        )
    call, operands = packed_norm(x, scale, eps, offset, layer_index)
    if x.size and scale.dtype == x.dtype and fits(call.columns, x.dtype, inbox) and _gains(x.nbytes, inbox):
        return add_norm(call, operands, addition, table, inbox)
    total = x + all_reduce(added(addition), table, inbox=inbox)
    return total, rms_norm(total, scale, eps=eps, offset=offset, layer_index=layer_index)


def _gains(num_bytes: int, inbox: Inbox) -> bool:
    """Whether so many bytes are not summed sooner by `all_reduce`, which stores less where many devices have much.

    In one kernel a device stores all to each other one; in two shots a share of it, twice. Of four H200s both take as
    long at 1.7 MB; no eight have been timed.
    """
    others = inbox.devices - 1
    return (others - 2 * others / inbox.devices) * num_bytes <= _MOST_STORED_MORE


def _check(x: Any, table: Any, inbox: Inbox) -> None:
    check_are_arrays(x=x, table=table)
    columns = 2 * inbox.devices + 2
    if table.shape != (columns,) or table.dtype != jnp.uint32:
        raise ValueError(
            f"`table` must be a row of `Inbox.table`, uint32 [{columns}]. Got {table.dtype} {list(table.shape)}."
        )


def _in_pieces(x: Any) -> Any:
    """Flat, with zeros behind it up to a multiple of 16 bytes."""
    numbers = PIECE_BYTES // x.dtype.itemsize
    short = -x.size % numbers if x.size else numbers
    flat = x.reshape(math.prod(x.shape))
    return jnp.pad(flat, (0, short)) if short else flat
