"""Keys that are turned once, ahead of extend's kernel, which then runs as it does without a rotary embedding.

The kernel can turn keys as it reads them, but every block of queries turns them again: (1, 8192) took four times as
long as without. Turned keys, and values of the same dtype, take memory besides the pool's, for as many keys as the page
table has room for. Keys that are not paged have no more rows than they were given with: they are always turned ahead.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.mosaic.sm90.extend_formats import ExtendFormats
from jattn_kernels.mosaic.sm90.extend_rows import owners
from jattn_kernels.mosaic.sm90.tiles import TILED_ROWS, PageCopies
from jattn_kernels.mosaic.sm90.turn_pages import turn_pages
from jattn_kernels.rope import rotate, shrink_of
from jattn_kernels.spec import AttentionSpec

KeysAndValues = tuple[Int[Array, "1"], Float[Array, "..."], Float[Array, "..."]]  # as `stacked` gives them

_MOST_BYTES = 512 * 1024**2
# Rows of queries a sequence. By its bytes, a key is turned ahead in the time in which some 270 rows are multiplied with
# it, and turned in the kernel it makes each row take four times as long: ahead would pay from 90 rows on. More are
# asked for since not all rows see all keys.
_LEAST_ROWS = 256


def turns_ahead(spec: AttentionSpec, formats: ExtendFormats, *, num_tokens: int, num_seqs: int, max_keys: int) -> bool:
    """Whether keys of pages are turned ahead, by shapes alone, since lengths are on the device.

    Results that must not depend on the batch come from one kernel whatever the batch is.

    Args:
        num_tokens: Of all sequences.
        max_keys: Of a sequence.
    """
    if not formats.turns or spec.batch_invariant:
        return False
    a_key = spec.num_kv_heads * (spec.head_dim + spec.value_dim) * formats.product.itemsize
    bounds = (max_keys, spec.chunk_size, None if spec.window_left is None else spec.window_left + 1)
    seen = min(bound for bound in bounds if bound is not None)
    rows = num_tokens * spec.group_size
    return num_seqs * max_keys * a_key <= _MOST_BYTES and rows * seen >= _LEAST_ROWS * num_seqs * max_keys


def turned_pages(
    keys_and_values: KeysAndValues,
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    *,
    spec: AttentionSpec,
    formats: ExtendFormats,
    copies: PageCopies,
) -> tuple[KeysAndValues, Int[Array, "B tiles"], PageCopies]:
    """Keys and values made ready, each tile of them a page, with their page table and how they are copied.

    Args:
        formats: Of a kernel that would turn keys itself.
        copies: From the pool's pages.
    """
    num_seqs, block_kv = seq_lens.shape[0], copies.block_kv
    num_tiles = max(1, math.ceil(page_table.shape[1] * copies.page_size / block_kv))
    k, v = turn_pages(
        keys_and_values, page_table, seq_lens, num_tiles=num_tiles, spec=spec, formats=formats, copies=copies
    )
    table = jnp.arange(num_seqs * num_tiles, dtype=jnp.int32).reshape(num_seqs, num_tiles)
    return (jnp.zeros(1, jnp.int32), k[None], v[None]), table, PageCopies(block_kv, block_kv, "HND")


def turned_rows(
    keys_and_values: KeysAndValues, starts: Int[Array, " B_plus_1"], *, spec: AttentionSpec, formats: ExtendFormats
) -> KeysAndValues:
    """Keys that are not paged turned by their numbers in their sequence's tiles, and values, both made ready, in XLA.

    Args:
        starts: Where sequences' rows begin. Their tiles begin at multiples of 8 rows.
        formats: Of a kernel that would turn keys itself.
    """
    assert spec.rope_theta is not None
    layer, *rows = keys_and_values
    k, v = (part[layer[0]].astype(formats.product) for part in rows)
    owner = jnp.minimum(owners(starts, k.shape[0]), starts.shape[0] - 2)
    position = jnp.arange(k.shape[0], dtype=jnp.int32) - (starts - starts % TILED_ROWS)[owner]
    shrink = shrink_of(formats.kv)
    k = rotate(k[None], position[None], theta=spec.rope_theta, scale=spec.rope_scale, shrink=shrink)
    return jnp.zeros_like(layer), k, v[None]
