"""Custom masks as FlashInfer takes them: one bool a query and key, or bits packed into bytes; host-side."""

from typing import Any

import numpy as np

from jattn.surfaces.flashinfer.page_lists import checked_indptr, host_array, padded


def mask_on_host(
    custom_mask: Any, packed_custom_mask: Any, q_lens: np.ndarray, kv_lens: np.ndarray, *, most: int | None = None
) -> np.ndarray | None:
    """The mask of a batch, sequence by sequence [q_len, kv_len] row-major, as bools; None without one.

    Args:
        packed_custom_mask: Taken in place of `custom_mask` if given; see `segment_packbits`.
        most: Bits that the mask's buffer holds, which the result then has; None without a buffer.

    Raises:
        ValueError: The mask has another size, does not fit its buffer, or is missing where there is a buffer.
    """
    sizes = q_lens * kv_lens
    if packed_custom_mask is not None:
        mask = _unpacked(host_array("packed_custom_mask", packed_custom_mask), sizes)
    elif custom_mask is not None:
        mask = host_array("custom_mask", custom_mask).reshape(-1)
        if mask.dtype != np.bool_ or len(mask) != sizes.sum():
            raise ValueError(
                f"`custom_mask` must be {sizes.sum()} bools, q_len * kv_len of each sequence. "
                f"Got custom_mask.dtype={mask.dtype}, {len(mask)} values."
            )
    elif most is None:
        return None
    else:
        raise ValueError("`custom_mask` must be given in every plan of a wrapper with `custom_mask_buf`. Got None.")
    if most is None:
        return mask
    if len(mask) > most:
        raise ValueError(f"The mask must fit `custom_mask_buf`, which holds {most} bits. Got {len(mask)} bits.")
    return padded(mask, most, False)


def packbits(x: Any, bitorder: str = "big") -> np.ndarray:
    """Bools packed into bytes, the last one filled with zeros."""
    return np.packbits(_bools(x), bitorder=_checked_order(bitorder))


def segment_packbits(x: Any, indptr: Any, bitorder: str = "big") -> tuple[np.ndarray, np.ndarray]:
    """Bools packed into bytes, each segment from a new byte on, and where each segment's bytes begin.

    The wrappers take the packed masks of bitorder "little".
    """
    x, indptr, order = _bools(x), checked_indptr("indptr", indptr), _checked_order(bitorder)
    if indptr[-1] > len(x):
        raise ValueError(f"`indptr` must end at {len(x)} at most, as `x` does. Got indptr[-1]={indptr[-1]}.")
    parts = [np.packbits(part, bitorder=order) for part in np.split(x[: indptr[-1]], indptr[1:-1])]
    return np.concatenate(parts), np.cumsum([0, *(len(part) for part in parts)], dtype=np.int32)


def _bools(x: Any) -> np.ndarray:
    found = host_array("x", x)
    if found.ndim != 1 or found.dtype.kind not in "biu":
        raise ValueError(f"`x` must be bools [bits]. Got x.shape={found.shape}, x.dtype={found.dtype}.")
    return found


def _checked_order(bitorder: str):
    if bitorder not in ("big", "little"):
        raise ValueError(f"`bitorder` must be big or little. Got {bitorder!r}.")
    return bitorder


def _unpacked(packed: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The bits of sequences of `sizes` bits that each begin a byte, lowest bit first."""
    bytes_of = -(-sizes // 8)
    if packed.dtype != np.uint8 or packed.ndim != 1 or len(packed) != bytes_of.sum():
        raise ValueError(
            f"`packed_custom_mask` must be {bytes_of.sum()} bytes, each sequence's q_len * kv_len bits from a new byte "
            f"on. Got packed_custom_mask.dtype={packed.dtype}, packed_custom_mask.shape={packed.shape}."
        )
    parts = np.split(packed, np.cumsum(bytes_of)[:-1])
    bits = [np.unpackbits(part, count=size, bitorder="little") for part, size in zip(parts, sizes, strict=True)]
    return np.concatenate(bits).astype(bool)
