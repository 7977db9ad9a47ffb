"""Appending keys and values to paged caches, and the bookkeeping of page lists; all jit-able."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.flashinfer.layer_facts import page_layout
from jattn.flashinfer.plan import PagedCache
from jattn_kernels import write_pages


def append_paged_kv_cache(
    append_key: Float[Array, "T K H"],
    append_value: Float[Array, "T K Hv"],
    batch_indices: Int[Array, " T"],
    positions: Int[Array, " T"],
    paged_kv_cache: PagedCache,
    kv_indices: Int[Array, " pages"],
    kv_indptr: Int[Array, " B_plus_1"],
    kv_last_page_len: Int[Array, " B"],
    kv_layout: str = "NHD",
    *,
    layer_index: Int[Array, ""] | int | None = None,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
) -> PagedCache:
    """The cache with each token's key and value at its place; donate the cache and keep what this returns.

    A token without a sequence of that number, or whose position is not among its sequence's keys, is written nowhere.

    Args:
        batch_indices: The sequence that each token belongs to.
        positions: Its place among the sequence's keys.
        paged_kv_cache: A pair of arrays, or one array whose axis after the pages' has keys and values.
        kv_indptr, kv_last_page_len: Of the lists that hold the new tokens already.
        layer_index: Which layer of a cache with a leading layer axis; may be traced.
        k_scale, v_scale: What is stored is key / k_scale; None is 1.

    Raises:
        ValueError: A shape or dtype is wrong, or `kv_layout` is unknown.
    """
    layout = page_layout(kv_layout)
    combined = not isinstance(paged_kv_cache, tuple | list)
    k_pages, v_pages = (paged_kv_cache, None) if combined else paged_kv_cache
    page_size = k_pages.shape[-3 if layout == "NHD" else -2]
    batch_size = kv_last_page_len.shape[0]
    lengths = get_seq_lens(kv_indptr, kv_last_page_len, page_size)
    sequence = jnp.clip(batch_indices, 0, batch_size - 1)
    owned = (batch_indices == sequence) & (positions >= 0) & (positions < lengths[sequence])
    page = kv_indices.at[kv_indptr[sequence] + positions // page_size].get(mode="fill", fill_value=-1)
    slots = jnp.where(owned & (page >= 0), page * page_size + positions % page_size, -1)
    k_pages, v_pages = write_pages(
        k_pages,
        v_pages,
        append_key,
        append_value,
        slots.astype(jnp.int32),
        layout=layout,
        combined_pool="pages_first" if combined else None,
        layer_index=layer_index,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return k_pages if v_pages is None else (k_pages, v_pages)


def get_seq_lens(
    kv_indptr: Int[Array, " B_plus_1"], kv_last_page_len: Int[Array, " B"], page_size: int
) -> Int[Array, " B"]:
    """Keys of each sequence of page lists; 0 without pages, whatever its last page's length."""
    held = jnp.diff(kv_indptr)
    return jnp.where(held > 0, page_size * (held - 1) + kv_last_page_len, 0)


def get_batch_indices_positions(
    append_indptr: Int[Array, " B_plus_1"], seq_lens: Int[Array, " B"], nnz: int
) -> tuple[Int[Array, " nnz"], Int[Array, " nnz"]]:
    """The sequence and the position of each of `nnz` appended tokens, the last ones of their sequences.

    Args:
        append_indptr: Where each sequence's new tokens begin.
        seq_lens: Keys of each sequence, the new ones included.

    Returns:
        Tokens past append_indptr[-1] get sequence -1 and position 0.
    """
    token = jnp.arange(nnz, dtype=jnp.int32)
    sequence = jnp.searchsorted(append_indptr[1:], token, side="right").astype(jnp.int32)
    real = token < append_indptr[-1]
    sequence = jnp.where(real, sequence, 0)
    position = seq_lens[sequence] - append_indptr[sequence + 1] + token
    return jnp.where(real, sequence, -1), jnp.where(real, position, 0).astype(jnp.int32)
