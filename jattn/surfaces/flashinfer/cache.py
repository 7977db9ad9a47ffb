"""FlashInfer's two forms of a paged cache: a pair of arrays, or one that holds keys and values."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jattn.arguments import array, shown

Pages = Float[Array | np.ndarray, "..."]
PagedCache = Pages | tuple[Pages, Pages] | list[Pages]


def pages_of(paged_kv_cache: Any) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
    """Pages of keys and of values, or both in one array and None; NumPy's arrays become JAX's.

    Raises:
        ValueError: It is neither a pair of arrays nor one array.
    """
    if isinstance(paged_kv_cache, jax.Array | np.ndarray):
        return array("paged_kv_cache", paged_kv_cache), None
    if not isinstance(paged_kv_cache, tuple | list) or len(paged_kv_cache) != 2:
        raise ValueError(
            "`paged_kv_cache` must be a pair of arrays, keys and values, or one array whose axis after the pages' has "
            f"the two. Got {shown('paged_kv_cache', paged_kv_cache)}."
        )
    k_pages, v_pages = (array(f"paged_kv_cache[{i}]", pages) for i, pages in enumerate(paged_kv_cache))
    return k_pages, v_pages


def words_of_cache(v_pages: Any) -> dict[str, str]:
    """What the kernels' `k_pages` and `v_pages` are called where `pages_of` gave them."""
    one = v_pages is None
    return {"k_pages": "paged_kv_cache" if one else "paged_kv_cache[0]", "v_pages": "paged_kv_cache[1]"}
