"""FlashInfer's page tables: one list of pages for all sequences, checked on the host and spread into rows in jit."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from jattn.arguments import check_int32_range, check_offsets, whole
from jattn.surfaces.flashinfer.buffers import Bounds


class PageLists(NamedTuple):
    """Sequence b has the pages indices[indptr[b] : indptr[b + 1]], the last one with last_page_len[b] tokens.

    Attributes:
        indptr: int32 [B + 1], from 0 and never falling.
        indices: int32 [indptr[-1]].
        seq_lens: int32 [B], in tokens; 0 without pages.
    """

    indptr: np.ndarray
    indices: np.ndarray
    seq_lens: np.ndarray

    @property
    def num_pages(self) -> int:
        """The least pages that a cache with these has."""
        return int(self.indices.max(initial=-1)) + 1


def host_array(name: str, values: Any) -> np.ndarray:
    """`values` on the host.

    Raises:
        ValueError: They are traced.
    """
    if isinstance(values, Tracer):
        raise ValueError(f"`{name}` is read on the host: call `plan` outside jit, and give `run` what it returns.")
    return np.asarray(values)


def host_integers(name: str, values: Any) -> np.ndarray:
    """Integers of 32 bits on the host; nothing may be of any dtype.

    Raises:
        ValueError: They are traced, or no such integers.
    """
    found = host_array(name, values)
    if found.size and not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"`{name}` must be integers. Got {name}.dtype={found.dtype}.")
    check_int32_range(name, found)
    return found


def checked_indptr(name: str, indptr: Any) -> np.ndarray:
    """Offsets on the host, as int32.

    Raises:
        ValueError: They are traced, or do not rise from 0.
    """
    indptr = host_array(name, indptr)
    if indptr.ndim != 1 or len(indptr) < 2 or not np.issubdtype(indptr.dtype, np.integer):
        raise ValueError(
            f"`{name}` must be integers [batch_size + 1] with batch_size at least 1. "
            f"Got {name}.shape={indptr.shape}, {name}.dtype={indptr.dtype}."
        )
    check_offsets(name, indptr)
    check_int32_range(name, indptr)
    return indptr.astype(np.int32)


def checked_page_lists(
    indptr: Any, indices: Any, last_page_len: Any, page_size: int, *, prefix: str = "", bounds: Bounds | None = None
) -> PageLists:
    """The lists on the host, padded to `bounds` with sequences without pages.

    Args:
        prefix: What the arguments' names begin with.

    Raises:
        ValueError: The lists contradict their rules or each other, or do not fit `bounds`.
    """
    page_size = whole("page_size", page_size)
    starts = checked_indptr(f"{prefix}indptr", indptr)
    pages, last = host_integers(f"{prefix}indices", indices), host_integers(f"{prefix}last_page_len", last_page_len)
    batch_size, num_pages = len(starts) - 1, int(starts[-1])
    if pages.ndim != 1 or len(pages) < num_pages:
        raise ValueError(
            f"`{prefix}indices` must have {prefix}indptr[-1] = {num_pages} entries. "
            f"Got {prefix}indices.shape={pages.shape}."
        )
    pages = pages[:num_pages]
    if (pages < 0).any():
        raise ValueError(f"`{prefix}indices` must hold pages of at least 0. Got {pages.min()}.")
    if last.shape != (batch_size,):
        raise ValueError(
            f"`{prefix}last_page_len` must be [batch_size={batch_size}]. Got {prefix}last_page_len.shape={last.shape}."
        )
    held = np.diff(starts)
    wrong = (held > 0) & ((last < 1) | (last > page_size))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"`{prefix}last_page_len` must be in 1 .. page_size={page_size} where a sequence has pages. "
            f"Got {prefix}last_page_len[{row}]={last[row]}."
        )
    seq_lens = np.where(held > 0, page_size * (held - 1) + last, 0)
    if bounds is not None:
        if batch_size > bounds.batch_size or num_pages > bounds.num_pages:
            raise ValueError(
                f"The plan must fit the buffers' {bounds.batch_size} sequences and {bounds.num_pages} pages. "
                f"Got {batch_size} sequences and {num_pages} pages."
            )
        starts = padded(starts, bounds.batch_size + 1, num_pages)
        seq_lens = padded(seq_lens, bounds.batch_size, 0)
    return PageLists(starts, pages.astype(np.int32), seq_lens.astype(np.int32))


def padded(values: np.ndarray, size: int, fill: Any) -> np.ndarray:
    """`values` with as many of `fill` after them as make `size`."""
    return np.pad(values, (0, size - len(values)), constant_values=fill)


def room(size: int) -> int:
    """The smallest power of two that holds `size`, so that batches of about one size share their compiled steps."""
    return 1 << max(0, size - 1).bit_length()


@functools.partial(jax.jit, static_argnames="max_pages")
def page_rows(
    indptr: Int[Array, " B_plus_1"], indices: Int[Array, " pages"], *, max_pages: int
) -> Int[Array, "B max_pages"]:
    """The page table of page lists; 0 past a sequence's last page."""
    place = indptr[:-1, None] + jnp.arange(max_pages, dtype=jnp.int32)[None]
    rows = indices.at[place].get(mode="fill", fill_value=0)
    return jnp.where(place < indptr[1:, None], rows, 0)
