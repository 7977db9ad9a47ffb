"""Reading one tile of keys and values for every tile of queries: from pages, latent pages or ragged arrays.

A fetcher called with (request, first_key, end), each [W], returns `tile_keys` keys and values for every tile of
queries, [W, S, K, H] and [W, S, K, Hv]: those numbered from `first_key` on, which must be a multiple of `align`, and
anything from key number `end` on.
"""

import dataclasses
import typing

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jattn_kernels.packed_latents import is_packed, unpack_latents
from jattn_kernels.spec import AttentionSpec

KEYS_PER_TILE = 64


@typing.no_type_check
@dataclasses.dataclass(frozen=True)
class _PagedFetcher:
    """Finds whole pages; a page past `end` is not looked up in the table."""

    page_table: Int[Array, "B max_pages"]
    layer_index: Int[Array, ""] | int | None
    spec: AttentionSpec
    page_size: int

    @property
    def align(self) -> int:
        return self.page_size

    @property
    def pages_per_tile(self) -> int:
        return max(1, min(KEYS_PER_TILE // self.page_size, self.page_table.shape[1]))

    @property
    def tile_keys(self) -> int:
        return self.pages_per_tile * self.page_size

    @property
    def layer(self) -> tuple:
        return () if self.layer_index is None else (self.layer_index,)

    def pages_of(self, request, first_key, end):
        """Number of each page of each tile, [W, pages_per_tile]."""
        column = (first_key // self.page_size)[:, None] + jnp.arange(self.pages_per_tile, dtype=jnp.int32)[None]
        table = self.page_table.at[request[:, None], column].get(mode="clip")
        return jnp.where(column * self.page_size < end[:, None], table, 0)


@typing.no_type_check
@dataclasses.dataclass(frozen=True)
class PageFetcher(_PagedFetcher):
    """Reads pages of K and of V, or both from a combined pool."""

    k_pages: Float[Array, "..."]
    v_pages: Float[Array, "..."] | None

    def __call__(self, request, first_key, end):
        page = self.pages_of(request, first_key, end)
        v_pages = self.k_pages if self.v_pages is None else self.v_pages
        return self._rows(self.k_pages, 0, page), self._rows(v_pages, 1, page)

    def _rows(self, pages, kv_index, page):
        match self.spec.combined_pool:
            case None:
                index = (*self.layer, page)
            case "pages_first":
                index = (*self.layer, page, kv_index)
            case "kv_first":
                index = (*self.layer, kv_index, page)
        rows = pages.at[index].get(mode="clip")
        if self.spec.page_layout == "HND":
            rows = rows.swapaxes(2, 3)
        return rows.reshape(page.shape[0], self.tile_keys, *rows.shape[3:])


@typing.no_type_check
@dataclasses.dataclass(frozen=True)
class LatentFetcher(_PagedFetcher):
    """Reads latent pages once: a row is the key of the one head, and its beginning is the value. Packed ones become
    float32 here."""

    latent_pages: Shaped[Array, "*L P page_size W"]

    def __call__(self, request, first_key, end):
        page = self.pages_of(request, first_key, end)
        rows = self.latent_pages.at[(*self.layer, page)].get(mode="clip")
        if is_packed(rows.dtype):
            rows = unpack_latents(rows, self.spec.value_dim)
        rows = rows.reshape(page.shape[0], self.tile_keys, 1, rows.shape[-1])
        return rows, rows[..., : self.spec.value_dim]


@typing.no_type_check
@dataclasses.dataclass(frozen=True)
class RaggedFetcher:
    """Reads rows of K and V that lie one request after the other."""

    k: Float[Array, "*L S K H"]
    v: Float[Array, "*L S K Hv"]
    cu_kv_lens: Int[Array, " B_plus_1"]
    layer_index: Int[Array, ""] | int | None

    align = 1

    @property
    def tile_keys(self) -> int:
        return min(KEYS_PER_TILE, self.k.shape[-3])

    def __call__(self, request, first_key, end):
        first = (self.cu_kv_lens[request] + first_key)[:, None]
        row = first + jnp.arange(self.tile_keys, dtype=jnp.int32)[None]
        index = (row,) if self.layer_index is None else (self.layer_index, row)
        return self.k.at[index].get(mode="clip"), self.v.at[index].get(mode="clip")


Fetcher = PageFetcher | LatentFetcher | RaggedFetcher
