"""Buffers of CUDA-graph wrappers, of which only the shapes count: they bound every plan."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a wrapper's buffers hold at most.

    Attributes:
        batch_size: Sequences.
        num_pages: Pages of all sequences.
        mask_bits: Bits of all masks; None where there are none.
    """

    batch_size: int
    num_pages: int = 0
    mask_bits: int | None = None

    def with_queries(self, qo_indptr_buf: Any, custom_mask_buf: Any) -> "Bounds":
        """The bounds of the same sequences with the buffer of their masks, if there is one.

        Raises:
            ValueError: A buffer is missing, not of one axis, or of other sequences.
        """
        if (size := buffer_size("qo_indptr_buf", qo_indptr_buf)) != self.batch_size + 1:
            raise ValueError(
                f"`qo_indptr_buf` must be [batch_size + 1] as the other buffers are: {self.batch_size + 1}. Got {size}."
            )
        if custom_mask_buf is None:
            return self
        return dataclasses.replace(self, mask_bits=8 * buffer_size("custom_mask_buf", custom_mask_buf))


def paged_bounds(**buffers: Any) -> Bounds:
    """What the three buffers of page lists hold, given by name: offsets, pages, lengths of last pages.

    Raises:
        ValueError: One is missing or not of one axis, or they do not belong together.
    """
    sizes = {name: buffer_size(name, buffer) for name, buffer in buffers.items()}
    (indptr, rows), (_, num_pages), (last, batch_size) = sizes.items()
    if rows != batch_size + 1 or batch_size < 1 or num_pages < 1:
        raise ValueError(
            f"`{indptr}` must be [batch_size + 1] and `{last}` [batch_size], no buffer empty. "
            f"Got {', '.join(f'{name} of {size}' for name, size in sizes.items())}."
        )
    return Bounds(batch_size, num_pages)


def buffer_size(name: str, buffer: Any) -> int:
    """The length of a buffer of one axis.

    Raises:
        ValueError: It is missing, or of another number of axes.
    """
    if buffer is None:
        raise ValueError(f"`{name}` must be given with use_cuda_graph=True: its shape bounds every plan. Got None.")
    shape = getattr(buffer, "shape", None)
    if shape is None or len(shape) != 1:
        got = type(buffer).__name__ if shape is None else f"{name}.shape={shape}"
        raise ValueError(f"`{name}` must be an array of one axis, or a `jax.ShapeDtypeStruct`. Got {got}.")
    return shape[0]
