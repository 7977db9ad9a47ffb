"""Rotary embedding by given angles, then the write into pages: what XLA makes one fusion each of."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jattn_kernels.pages import write_pages
from jattn_kernels.spec import AttentionSpec


def rotate(
    x: Float[Array, "T heads H"], cos: Float32[Array, "T half"], sin: Float32[Array, "T half"]
) -> Float[Array, "T heads H"]:
    """Pairs (i, i + half) of each head turned by their angles, in float32; what lies past the pairs stays."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def rotate_and_write(
    qkv: Float[Array, "T heads H"],
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    slots: Int[Array, " T"],
    layer_index: Int[Array, ""] | int | None,
    *,
    spec: AttentionSpec,
) -> tuple[Float[Array, "T N H"], Float[Array, "..."], Float[Array, "..."]]:
    """Turned queries, and the pages with the turned keys and the values."""
    q, k, v = jnp.split(qkv, (spec.num_q_heads, spec.num_q_heads + spec.num_kv_heads), axis=1)
    written = write_pages(
        k_pages, v_pages, rotate(k, cos, sin), v, slots, layout=spec.page_layout, layer_index=layer_index
    )
    k_pages, new_v_pages = written
    assert new_v_pages is not None
    return rotate(q, cos, sin), k_pages, new_v_pages
