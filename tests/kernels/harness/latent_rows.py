"""Latent rows that are not made yet, pages to write them into, and what packed pages must hold then."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn_kernels import RawLatents, mla_write, write_latent_pages
from jattn_kernels.packed_latents import packed_width

LAYER = 1


def arguments(compressed=256, tokens=5, dtype="bfloat16"):
    """Rows, pages of three layers, and slots, two of them out of range."""
    random = np.random.default_rng(0)
    angles = random.uniform(0, 6, (tokens, 32)).astype(np.float32)
    latents = RawLatents(
        rows=jnp.asarray(random.standard_normal((tokens, compressed + 64)), dtype),
        scale=jnp.asarray(random.uniform(0.5, 1.5, (3, compressed)), dtype),
        layer_index=2,
        cos=jnp.asarray(np.cos(angles)),
        sin=jnp.asarray(np.sin(angles)),
        eps=1e-6,
    )
    num_pages = 4 + tokens // 16
    pages = jnp.asarray(random.standard_normal((3, num_pages, 16, compressed + 64)), dtype)
    slots = jnp.asarray([17, -1, 3, num_pages * 16, *range(40, 36 + tokens)], jnp.int32)
    return latents, pages, slots


def packed_arguments(compressed=512, tokens=5, dtype="bfloat16"):
    """The same with pages of bytes, all bits of which are set before."""
    latents, pages, slots = arguments(compressed, tokens, dtype)
    return latents, jnp.full((*pages.shape[:3], packed_width(compressed, 64)), 0xFF, jnp.uint8), slots


def assert_packs(given, implementation, rows=None):
    """Rows come near those of XLA's, and the pages have these very rows, packed."""
    latents, pages, slots = given
    raw = latents if rows is None else dataclasses.replace(latents, rows=rows)
    made, written = jax.jit(
        lambda raw, pages, layer: mla_write(raw, pages, slots, layer_index=layer, implementation=implementation)
    )(raw, pages, jnp.int32(LAYER))
    bit = float(jnp.finfo(made.dtype).eps)
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (made, latents.made())), rtol=bit, atol=1e-6)
    parts = jnp.split(made, (latents.compressed,), axis=-1)
    np.testing.assert_array_equal(written, write_latent_pages(pages, *parts, slots, layer_index=LAYER))


PACKED = [(512, "bfloat16"), (384, "float16"), (132, "float32")]
