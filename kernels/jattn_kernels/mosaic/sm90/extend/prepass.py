"""The prepass of extend: keys and values rotated, dequantised, or gathered from small pages, once ahead of the kernel.

The kernel can do each of these as it reads a tile, but every block of queries does it again: (1, 8192) takes four times
as long where keys are rotated, and 5 % more where they come in pages of 16. What is converted takes memory besides the
pool's, for as many tiles of keys as the page table has room for. Keys that are not paged have no more rows than they
were given with: they are always rotated ahead.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.lowering.rope import rotate, shrink_of
from jattn_kernels.lowering.token_bounds import owners
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, PageCopies, rows_of_best_copy
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.mosaic.sm90.extend.prepass_kernel import convert_pages
from jattn_kernels.spec import AttentionSpec

KeysAndValues = tuple[Int[Array, "1"], Float[Array, "..."], Float[Array, "..."]]  # as `stacked` gives them

_MOST_BYTES = 512 * 1024**2
_MOST_KEYS_A_TILE = 128
_SMALL_COPY_BYTES = 4 * 1024
# Rows of queries a sequence from which on it pays. To convert a key takes as long as some 600 rows' products with
# it, half of which the causal rule hides.
_ROWS_TO_ROTATE = 256
_ROWS_TO_DEQUANTISE = 4 * 1024
_ROWS_TO_GATHER = 12 * 1024


def has_prepass(
    spec: AttentionSpec, dtypes: ExtendDtypes, *, page_size: int, num_tokens: int, num_seqs: int, max_keys: int
) -> bool:
    """Whether keys and values of pages are converted ahead: by shapes alone, since lengths are on the device.

    Args:
        dtypes: Of a kernel that would convert them itself.
        num_tokens: Of all sequences.
        max_keys: Of a sequence.
    """
    a_key = spec.num_kv_heads * (spec.head_dim + spec.value_dim) * dtypes.product.itemsize
    bounds = (max_keys, spec.chunk_size, None if spec.window_left is None else spec.window_left + 1)
    seen = min(bound for bound in bounds if bound is not None)
    rows = num_tokens * spec.group_size * seen // max(1, num_seqs * max_keys)
    least = _least_rows(spec, dtypes, page_size)
    whole_tiles = max_keys + -max_keys % _MOST_KEYS_A_TILE
    return least is not None and rows >= least and num_seqs * whole_tiles * a_key <= _MOST_BYTES


def _least_rows(spec: AttentionSpec, dtypes: ExtendDtypes, page_size: int) -> int | None:
    """Rows of queries a sequence from which on keys had better be converted ahead; None if never."""
    if dtypes.rotates or dtypes.dequantises:
        # Results that must not depend on the batch come from one kernel, whatever the batch is.
        if spec.batch_invariant or (not dtypes.rotates and dtypes.has_narrow_product):
            return None
        return _ROWS_TO_ROTATE if dtypes.rotates else _ROWS_TO_DEQUANTISE
    copy_bytes = page_size * max(spec.head_dim, spec.value_dim) * dtypes.kv.itemsize
    return _ROWS_TO_GATHER if copy_bytes <= _SMALL_COPY_BYTES else None


def prepass(
    keys_and_values: KeysAndValues,
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    *,
    spec: AttentionSpec,
    dtypes: ExtendDtypes,
    copies: PageCopies,
) -> tuple[KeysAndValues, Int[Array, "B tiles"], PageCopies]:
    """Keys and values converted, each tile of them a page, with their page table and how they are copied.

    Args:
        dtypes: Of a kernel that would convert them itself.
        copies: From the pool's pages.
    """
    num_seqs, block_kv = seq_lens.shape[0], copies.block_kv
    num_tiles = max(1, math.ceil(page_table.shape[1] * copies.page_size / block_kv))
    k, v = convert_pages(
        keys_and_values, page_table, seq_lens, num_tiles=num_tiles, spec=spec, dtypes=dtypes, copies=copies
    )
    table = jnp.arange(num_seqs * num_tiles, dtype=jnp.int32).reshape(num_seqs, num_tiles)
    most_rows = rows_of_best_copy(max(spec.head_dim, spec.value_dim), dtypes.product)
    return (jnp.zeros(1, jnp.int32), k[None], v[None]), table, PageCopies(block_kv, block_kv, "HND", None, most_rows)


def rotated_rows(
    keys_and_values: KeysAndValues, starts: Int[Array, " B_plus_1"], *, spec: AttentionSpec, dtypes: ExtendDtypes
) -> KeysAndValues:
    """Keys that are not paged rotated by their numbers in their sequence's tiles, and values, both converted, in XLA.

    Args:
        starts: Where sequences' rows begin. Their tiles begin at multiples of 8 rows.
        dtypes: Of a kernel that would rotate keys itself.
    """
    assert spec.rope_theta is not None
    layer, *rows = keys_and_values
    k, v = (part[layer[0]].astype(dtypes.product) for part in rows)
    owner = jnp.minimum(owners(starts, k.shape[0]), starts.shape[0] - 2)
    position = jnp.arange(k.shape[0], dtype=jnp.int32) - (starts - starts % TILED_ROWS)[owner]
    shrink = shrink_of(dtypes.kv)
    k = rotate(k[None], position[None], theta=spec.rope_theta, scale=spec.rope_scale, shrink=shrink)
    return jnp.zeros_like(layer), k, v[None]
