"""Calls of the rotary embedding with the page write, and what plain loops make of them."""

import jax.numpy as jnp
import numpy as np

from jattn_kernels import HeadNorms

LAYERS, SLOTS = 2, 32  # slots of a layer, at least
SHAPES = [(8, 4, 64, "NHD"), (8, 4, 128, "HND"), (6, 2, 128, "NHD"), (4, 2, 256, "NHD")]


def arguments(num_q_heads, num_kv_heads, head_dim, layout, *, dtype="bfloat16", kv_dtype=None, half=None, page_size=8):
    """Five tokens, of which the third and fourth are nowhere in the pages."""
    rng = np.random.default_rng(0)
    num_pages = -(-SLOTS // page_size)
    num_slots = num_pages * page_size
    slots = (3, num_slots - 1, -1, num_slots, 9)
    page = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
    angles = rng.uniform(-4, 4, (len(slots), head_dim // 2 if half is None else half))
    qkv, k_pages, v_pages = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in (
            (len(slots), num_q_heads + 2 * num_kv_heads, head_dim),
            (LAYERS, num_pages, *page, head_dim),
            (LAYERS, num_pages, *page, head_dim),
        )
    )
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    k_pages, v_pages = (pages.astype(kv_dtype or dtype) for pages in (k_pages, v_pages))
    return qkv, cos, sin, k_pages, v_pages, jnp.asarray(slots, jnp.int32)


def head_norms(head_dim, *, dtype="bfloat16", kind="layers"):
    """Norms with a stack of scales, with scales, with an offset, or without scales."""
    rng = np.random.default_rng(1)
    q_scale, k_scale = (jnp.asarray(rng.uniform(0.5, 2, (LAYERS, head_dim)), dtype) for _ in range(2))
    match kind:
        case "layers":
            return HeadNorms(q_scale=q_scale, k_scale=k_scale, layer_index=1, eps=1e-6)
        case "offset":
            return HeadNorms(q_scale=q_scale[0], k_scale=k_scale[0], eps=1e-2, offset=1.0)
    return HeadNorms(eps=1e-5)


NORM_KINDS = ("layers", "offset", "no scales")


def normed(qkv, norms, num_kv_heads):
    """Heads over their root mean square, one by one, in float64."""
    (rows,) = as_float32(qkv)
    rows, scales = rows.astype(np.float64), norms.scales()
    first_key, first_value = rows.shape[1] - 2 * num_kv_heads, rows.shape[1] - num_kv_heads
    for head in range(first_value):
        factor = 1.0
        if scales is not None:
            stack = scales[0] if head < first_key else scales[1]
            factor = as_float32(stack)[0][int(scales[2])] + norms.offset
        root = np.sqrt(np.mean(rows[:, head] ** 2, axis=-1, keepdims=True) + norms.eps)
        rows[:, head] = rows[:, head] / root * factor
    return jnp.asarray(rows, jnp.float32).astype(qkv.dtype)


def as_float32(*arrays):
    """In NumPy."""
    return [np.asarray(a.astype(jnp.float32)) for a in arrays]


def expected(num_kv_heads, layout, layer, qkv, cos, sin, k_pages, v_pages, slots):
    """One head and one pair at a time."""
    dtype, kv_dtype = qkv.dtype, k_pages.dtype
    qkv, cos, sin, k_pages, v_pages = as_float32(qkv, cos, sin, k_pages, v_pages)
    half, num_q_heads = cos.shape[1], qkv.shape[1] - 2 * num_kv_heads
    num_pages, page_size = k_pages.shape[1], k_pages.shape[2 if layout == "NHD" else 3]
    turned = qkv.copy()
    for t, head, i in np.ndindex(qkv.shape[0], num_q_heads + num_kv_heads, half):
        a, b = qkv[t, head, i], qkv[t, head, i + half]
        turned[t, head, i] = a * cos[t, i] - b * sin[t, i]
        turned[t, head, i + half] = b * cos[t, i] + a * sin[t, i]
    (turned,) = as_float32(jnp.asarray(turned).astype(dtype))
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    for t, slot in enumerate(np.asarray(slots).tolist()):
        if 0 <= slot < num_pages * page_size:
            for head in range(num_kv_heads):
                page, offset = divmod(slot, page_size)
                place = (layer, page, offset, head) if layout == "NHD" else (layer, page, head, offset)
                k_pages[place] = turned[t, num_q_heads + head]
                v_pages[place] = turned[t, num_q_heads + num_kv_heads + head]
    return turned[:, :num_q_heads], *as_float32(*(jnp.asarray(pages).astype(kv_dtype) for pages in (k_pages, v_pages)))


def assert_agrees(results, wanted, *, normed_as=None):
    """A product and a sum in float32 may be one rounding or two: a unit in the last place of the result's dtype.

    Args:
        normed_as: The dtype that numbers were rounded to between norm and rotation: both numbers of a pair may be the
            next to the right ones there.
    """
    for result, right in zip(results, wanted, strict=True):
        facts = jnp.finfo(result.dtype)
        tolerance = {"rtol": float(facts.eps), "atol": max(1e-6, float(facts.smallest_subnormal))}
        if normed_as is not None:
            tolerance["atol"] += 2**0.5 * float(jnp.finfo(normed_as).eps) * np.nanmax(np.abs(right))
        np.testing.assert_allclose(*as_float32(result), right, **tolerance)
