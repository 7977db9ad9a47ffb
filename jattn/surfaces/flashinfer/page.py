"""Appending keys and values to paged caches, and the bookkeeping of page lists; all jit-able."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.arguments import array, in_words, integers, scale_arrays, whole
from jattn.surfaces.flashinfer.cache import PagedCache, pages_of, words_of_cache
from jattn.surfaces.flashinfer.layer_facts import page_layout
from jattn_kernels import write_pages


def append_paged_kv_cache(
    append_key: Float[Array, "T K H"],
    append_value: Float[Array, "T K Hv"],
    batch_indices: Int[Any, " T"],
    positions: Int[Any, " T"],
    paged_kv_cache: PagedCache,
    kv_indices: Int[Any, " pages"],
    kv_indptr: Int[Any, " B_plus_1"],
    kv_last_page_len: Int[Any, " B"],
    kv_layout: str = "NHD",
    *,
    layer_index: Int[Array, ""] | int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
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
    append_key = array("append_key", append_key, "T", "K", "H")
    append_value = array("append_value", append_value, "T", "K", "H")
    tokens = append_key.shape[:1]
    batch_indices = _of_shape("batch_indices", batch_indices, tokens)
    positions = _of_shape("positions", positions, tokens)
    kv_indices = integers("kv_indices", kv_indices, "pages")
    k_pages, v_pages = pages_of(paged_kv_cache)
    combined = v_pages is None
    if k_pages.ndim < 4:
        raise ValueError(f"`paged_kv_cache` must have pages of tokens of heads. Got a shape of {k_pages.shape}.")
    page_size = k_pages.shape[-3 if layout == "NHD" else -2]
    lengths = get_seq_lens(kv_indptr, kv_last_page_len, page_size)
    batch_size, kv_indptr = lengths.shape[0], jnp.asarray(kv_indptr)
    sequence = jnp.clip(batch_indices, 0, batch_size - 1)
    owned = (batch_indices == sequence) & (positions >= 0) & (positions < lengths[sequence])
    page = kv_indices.at[kv_indptr[sequence] + positions // page_size].get(mode="fill", fill_value=-1)
    slots = jnp.where(owned & (page >= 0), page * page_size + positions % page_size, -1)
    with in_words(k="append_key", v="append_value", **words_of_cache(v_pages)):
        k_pages, v_pages = write_pages(
            k_pages,
            v_pages,
            append_key,
            append_value,
            slots,
            layout=layout,
            combined_pool="pages_first" if combined else None,
            layer_index=layer_index,
            **scale_arrays(k_scale=k_scale, v_scale=v_scale),
        )
    return k_pages if v_pages is None else (k_pages, v_pages)


def get_seq_lens(
    kv_indptr: Int[Any, " B_plus_1"], kv_last_page_len: Int[Any, " B"], page_size: int
) -> Int[Array, " B"]:
    """Keys of each sequence of page lists; 0 without pages, whatever its last page's length.

    Raises:
        ValueError: An argument is no such number or array, or the two do not belong together.
    """
    last = integers("kv_last_page_len", kv_last_page_len, "batch_size")
    held = jnp.diff(_of_shape("kv_indptr", kv_indptr, (last.shape[0] + 1,)))
    return jnp.where(held > 0, whole("page_size", page_size) * (held - 1) + last, 0)


def get_batch_indices_positions(
    append_indptr: Int[Any, " B_plus_1"], seq_lens: Int[Any, " B"], nnz: int
) -> tuple[Int[Array, " nnz"], Int[Array, " nnz"]]:
    """The sequence and the position of each of `nnz` appended tokens, the last ones of their sequences.

    Args:
        append_indptr: Where each sequence's new tokens begin.
        seq_lens: Keys of each sequence, the new ones included.

    Returns:
        Tokens past append_indptr[-1] get sequence -1 and position 0.

    Raises:
        ValueError: An argument is no such number or array, or the two do not belong together.
    """
    seq_lens = integers("seq_lens", seq_lens, "batch_size")
    append_indptr = _of_shape("append_indptr", append_indptr, (seq_lens.shape[0] + 1,))
    token = jnp.arange(whole("nnz", nnz, 0), dtype=jnp.int32)
    sequence = jnp.searchsorted(append_indptr[1:], token, side="right").astype(jnp.int32)
    real = token < append_indptr[-1]
    sequence = jnp.where(real, sequence, 0)
    position = seq_lens[sequence] - append_indptr[sequence + 1] + token
    return jnp.where(real, sequence, -1), jnp.where(real, position, 0).astype(jnp.int32)


def _of_shape(name: str, values: Any, shape: tuple[int, ...]) -> Int[Array, " n"]:
    found = integers(name, values, "n")
    if found.shape != shape:
        raise ValueError(f"`{name}` must be integers {list(shape)}. Got {name}.shape={found.shape}.")
    return found
