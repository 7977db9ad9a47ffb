"""Operands that all kernels over a pool have: its layers, and which of them is meant."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def stacked(
    k_pages: Shaped[Array, "..."], v_pages: Shaped[Array, "..."] | None, layer_index: Int[Array, ""] | int | None
) -> tuple[Int[Array, "1"], Shaped[Array, "..."], Shaped[Array, "..."]]:
    """The layer as the kernels read it, and pages with a leading layer axis; the same ones twice if they hold both."""
    v_pages = k_pages if v_pages is None else v_pages
    if layer_index is None:
        return jnp.zeros(1, jnp.int32), k_pages[None], v_pages[None]
    return jnp.asarray(layer_index, jnp.int32).reshape(1), k_pages, v_pages
