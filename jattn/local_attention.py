"""Chunked local attention as virtual batches: each chunk of a request becomes a request of its own."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.arguments import check_array, check_offsets, host_integers, whole_number


class _Cuts(NamedTuple):
    """Where each request is cut, in absolute positions; all [B].

    Attributes:
        early: Rows before the request's first key, which see nothing.
        first: Position of the first row that sees a key.
        chunk: Number of the chunk that this row is in.
        counts: Virtual batches: one a chunk, after one of the early rows.
    """

    early: Any
    first: Any
    chunk: Any
    counts: Any


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc_np: Int[np.ndarray, " B_plus_1"],
    seq_lens_np: Int[np.ndarray, " B"],
    block_table: Int[Any, "B max_pages"],
    page_size: int = 0,
) -> tuple[Int[np.ndarray, " V"], Int[np.ndarray, " V_plus_1"], Int[np.ndarray, " V"], Int[Any, "V pages_a_chunk"]]:
    """Query lengths, query offsets, key lengths and page tables of the virtual batches, in the requests' order.

    Attention over these in place of the requests is what `chunk_size` asks of a kernel, all other rules included. A
    request without queries has none. The rows of a request before its first key come first, in one virtual batch
    without keys and with page 0.

    Args:
        attn_chunk_size: Tokens a chunk.
        seq_lens_np: Keys of each request, this pass's included.
        block_table: Its pages; columns beyond its width repeat the last one.
        page_size: Tokens a page; must divide the chunk, so the default is an error.

    Raises:
        ValueError: `attn_chunk_size` is no positive multiple of a positive `page_size`, or an array is none of
            integers, or of another size than the others; offsets fall, or a length is negative.
    """
    _check_sizes(attn_chunk_size, page_size)
    query_start_loc_np = host_integers("query_start_loc_np", query_start_loc_np, "batch_size + 1")
    seq_lens_np = host_integers("seq_lens_np", seq_lens_np, "batch_size")
    check_array("block_table", block_table, "batch_size", "max_pages")
    sizes = len(query_start_loc_np) - 1, len(seq_lens_np), block_table.shape[0]
    if len(set(sizes)) > 1 or not all(block_table.shape):
        raise ValueError(
            "`query_start_loc_np` must have an entry more than `seq_lens_np`, and `block_table` a row for each. "
            f"Got {sizes[0]} requests, {sizes[1]} and {block_table.shape}."
        )
    check_offsets("query_start_loc_np", query_start_loc_np)
    if (seq_lens_np < 0).any():
        raise ValueError(f"`seq_lens_np` must be lengths of at least 0. Got {seq_lens_np.tolist()}.")
    cuts = _cuts(np, attn_chunk_size, np.diff(query_start_loc_np), seq_lens_np)
    ends = np.cumsum(cuts.counts, dtype=np.int32)
    sequence = np.repeat(np.arange(len(seq_lens_np)), cuts.counts)
    index = np.arange(len(sequence), dtype=np.int32) - (ends - cuts.counts)[sequence]
    q_lens, k_lens, columns = _virtual(np, cuts, sequence, index, seq_lens_np, attn_chunk_size, page_size)
    cu_q_lens = np.concatenate([np.zeros(1, np.int32), np.cumsum(q_lens, dtype=np.int32)])
    pages = block_table[sequence[:, None], np.minimum(columns, block_table.shape[1] - 1)]
    return q_lens, cu_q_lens, k_lens, pages * (k_lens > 0)[:, None].astype(pages.dtype)


def max_virtual_batches(attn_chunk_size: int, batch_size: int, num_tokens: int) -> int:
    """The most virtual batches that a batch of these sizes can make."""
    return min(2 * batch_size - (-num_tokens // attn_chunk_size), num_tokens)


def pad_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc: Int[Array, " B_plus_1"],
    seq_lens: Int[Array, " B"],
    block_table: Int[Array, "B max_pages"],
    page_size: int,
    num_tokens: int,
) -> tuple[Int[Array, " V"], Int[Array, " V_plus_1"], Int[Array, " V"], Int[Array, "V pages_a_chunk"]]:
    """What `make_local_attention_virtual_batches` returns, padded to `max_virtual_batches`; jit-able.

    Unused virtual batches come last, without queries and keys and with page 0. In decode, one token a sequence, virtual
    batch i is request i.

    Args:
        query_start_loc: The last entry counts the real tokens.
        num_tokens: Tokens, padded ones included; with the sizes of a chunk and a page it is static.

    Raises:
        ValueError: As there, or `num_tokens` is below 1.
    """
    _check_sizes(attn_chunk_size, page_size)
    if num_tokens < 1:
        raise ValueError(f"`num_tokens` must be at least 1. Got num_tokens={num_tokens}.")
    cuts = _cuts(jnp, attn_chunk_size, jnp.diff(query_start_loc), seq_lens)
    ends = jnp.cumsum(cuts.counts, dtype=jnp.int32)
    batch = jnp.arange(max_virtual_batches(attn_chunk_size, len(seq_lens), num_tokens), dtype=jnp.int32)
    used = batch < ends[-1]
    sequence = jnp.sum(ends[None, :] <= batch[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, len(seq_lens) - 1)
    index = batch - (ends - cuts.counts)[sequence]
    q_lens, k_lens, columns = _virtual(jnp, cuts, sequence, index, seq_lens, attn_chunk_size, page_size)
    q_lens, k_lens = jnp.where(used, q_lens, 0), jnp.where(used, k_lens, 0)
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
    pages = block_table[sequence[:, None], jnp.minimum(columns, block_table.shape[1] - 1)]
    return q_lens, cu_q_lens, k_lens, jnp.where((k_lens > 0)[:, None], pages, 0)


def _check_sizes(attn_chunk_size: int, page_size: int) -> None:
    rule = "`attn_chunk_size` must be a positive multiple of a positive `page_size`."
    for size in (attn_chunk_size, page_size):
        whole_number(size, rule, -(2**31), 2**31)
    if page_size < 1 or attn_chunk_size < 1 or attn_chunk_size % page_size:
        raise ValueError(f"{rule} Got attn_chunk_size={attn_chunk_size}, page_size={page_size}.")


def _cuts(xp: Any, chunk_size: int, q_lens: Any, kv_lens: Any) -> _Cuts:
    q_lens, kv_lens = q_lens.astype(np.int32), kv_lens.astype(np.int32)
    early = xp.clip(q_lens - kv_lens, 0, q_lens)
    first = xp.maximum(kv_lens - q_lens, 0)
    chunk = first // chunk_size
    chunks = xp.where(q_lens > early, (kv_lens - 1) // chunk_size - chunk + 1, 0)
    return _Cuts(early, first, chunk, chunks + (early > 0).astype(np.int32))


def _virtual(
    xp: Any, cuts: _Cuts, sequence: Any, index: Any, kv_lens: Any, chunk_size: int, page_size: int
) -> tuple[Any, Any, Any]:
    """Query and key lengths and columns of the page table of virtual batch `index` of each `sequence`."""
    early = cuts.early[sequence]
    chunk = cuts.chunk[sequence] + index - (early > 0).astype(np.int32)
    is_early = (early > 0) & (index == 0)
    start = xp.where(is_early, 0, chunk * chunk_size)
    end = xp.minimum(start + chunk_size, kv_lens.astype(np.int32)[sequence])
    q_lens = xp.where(is_early, early, end - xp.maximum(start, cuts.first[sequence]))
    columns = (start // page_size)[:, None] + xp.arange(chunk_size // page_size, dtype=np.int32)[None]
    return q_lens, xp.where(is_early, 0, end - start), columns
