"""Custom masks as FlashInfer takes them: one bool a query and key, or bits packed into bytes."""

from typing import Any

import jax.numpy as jnp
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
    mask = checked_mask(custom_mask, packed_custom_mask, q_lens * kv_lens)
    if most is None:
        return mask
    if mask is None:
        raise ValueError("`custom_mask` must be given in every plan of a wrapper with `custom_mask_buf`. Got None.")
    if len(mask) > most:
        raise ValueError(f"The mask must fit `custom_mask_buf`, which holds {most} bits. Got {len(mask)} bits.")
    return padded(mask, most, False)


def checked_mask(custom_mask: Any, packed_custom_mask: Any, sizes: np.ndarray, read: Any = host_array) -> Any:
    """The bools of sequences of `sizes` bits; None without a mask.

    Args:
        packed_custom_mask: Each sequence's bits from a new byte on, lowest bit first.
        read: Makes an array of what is given, on the host or one that may be traced.

    Raises:
        ValueError: The mask has another size.
    """
    if packed_custom_mask is not None:
        packed, bytes_of = read("packed_custom_mask", packed_custom_mask), -(-sizes // 8)
        if packed.dtype != np.uint8 or packed.shape != (bytes_of.sum(),):
            raise ValueError(
                f"`packed_custom_mask` must be {bytes_of.sum()} bytes, each sequence's q_len * kv_len bits from a new "
                f"byte on. Got packed_custom_mask.dtype={packed.dtype}, packed_custom_mask.shape={packed.shape}."
            )
        xp: Any = np if isinstance(packed, np.ndarray) else jnp
        parts = zip(xp.split(packed, np.cumsum(bytes_of)[:-1]), sizes.tolist(), strict=True)
        return xp.concatenate([xp.unpackbits(part, count=n, bitorder="little") for part, n in parts]).astype(bool)
    if custom_mask is None:
        return None
    mask = read("custom_mask", custom_mask).reshape(-1)
    if mask.dtype != np.bool_ or len(mask) != sizes.sum():
        raise ValueError(
            f"`custom_mask` must be {sizes.sum()} bools, q_len * kv_len of each sequence. "
            f"Got custom_mask.dtype={mask.dtype}, {len(mask)} values."
        )
    return mask


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
