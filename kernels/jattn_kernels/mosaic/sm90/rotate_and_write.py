"""Rotary embedding and the write of keys and values into their pages, in one kernel.

grid (tokens)        one warpgroup: queries, keys and values of a token come in as two halves of all heads, are turned
                     in registers some heads at a time, and go out as halves: to q, and to its place in the pages
shared memory: the halves as they came, and turned; the token's angles, once for each head of a vector
"""

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jattn_kernels.mosaic.sm90 import tiles
from jattn_kernels.mosaic.sm90.paged import stacked
from jattn_kernels.spec import AttentionSpec

_THREADS = 128


def heads_at_once(spec: AttentionSpec) -> int | None:
    """Heads that are turned together, so that all threads have the same to do; None if the head counts forbid it."""
    common = math.gcd(spec.num_q_heads, spec.num_kv_heads)
    fitting = [n for n in range(1, common + 1) if common % n == 0 and n * (spec.head_dim // 2) % _THREADS == 0]
    # Two numbers a thread if possible: each head more is one more copy of the angles.
    return next((n for n in fitting if n * spec.head_dim // 2 >= 2 * _THREADS), max(fitting, default=None))


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
    """Turned queries, and the pages with the token's turned keys and its values at their slots."""
    num_tokens, num_heads, head_dim = qkv.shape
    half, num_kv_heads = head_dim // 2, spec.num_kv_heads
    rotated = spec.num_q_heads + num_kv_heads
    at_once = heads_at_once(spec)
    assert at_once is not None
    by_token = spec.page_layout == "NHD"
    layer, k_layers, v_layers = stacked(k_pages, v_pages, layer_index)
    num_pages, page_size = k_layers.shape[1], k_layers.shape[2 if by_token else 3]
    shape = (at_once, half)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(at_once * half // _THREADS, 8))

    def kernel(qkv_ref, cos_ref, sin_ref, slots_ref, layer_ref, k_ref, v_ref, q_ref, came, turned, angles, came_full):
        token = lax.axis_index("token")
        for part, angle_ref in enumerate((cos_ref, sin_ref)):
            plgpu.copy_gmem_to_smem(qkv_ref.at[token, :, part], came.at[part], came_full)
            for head in range(at_once):
                plgpu.copy_gmem_to_smem(angle_ref.at[token], angles.at[part, head], came_full)
        slot = slots_ref[token]
        is_written = (slot >= 0) & (slot < num_pages * page_size)
        plgpu.barrier_wait(came_full)
        cos, sin = (plgpu.load(angles.at[part], layout=layout, optimized=False) for part in range(2))

        def place(pages_ref, part):
            if by_token:
                return pages_ref.at[layer_ref[0] * (num_pages * page_size) + slot, :, part]
            page = layer_ref[0] * num_pages + lax.div(slot, page_size)
            return pages_ref.at[page, :, lax.rem(slot, page_size), part]

        @pl.when(is_written)
        def write_values():
            for part in range(2):
                plgpu.copy_smem_to_gmem(came.at[part, pl.ds(rotated, num_kv_heads)], place(v_ref, part))

        for first in range(0, rotated, at_once):
            heads = pl.ds(first, at_once)
            first_half, second_half = (
                plgpu.load(came.at[part, heads], layout=layout, optimized=False).astype(jnp.float32)
                for part in range(2)
            )
            turned[0, heads] = (first_half * cos - second_half * sin).astype(qkv.dtype)
            turned[1, heads] = (second_half * cos + first_half * sin).astype(qkv.dtype)
        plgpu.commit_smem()
        for part in range(2):
            plgpu.copy_smem_to_gmem(turned.at[part, pl.ds(0, spec.num_q_heads)], q_ref.at[token, :, part])

        @pl.when(is_written)
        def write_keys():
            for part in range(2):
                source = turned.at[part, pl.ds(spec.num_q_heads, num_kv_heads)]
                plgpu.copy_smem_to_gmem(source, place(k_ref, part))

        plgpu.wait_smem_to_gmem(0)

    run: Any = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens, spec.num_q_heads, 2, half), qkv.dtype),
        scratch_types=(
            plgpu.SMEM((2, num_heads, half), qkv.dtype),
            plgpu.SMEM((2, rotated, half), qkv.dtype),
            plgpu.SMEM((2, at_once, half), jnp.float32),
            plgpu.Barrier(num_arrivals=2 + 2 * at_once),
        ),
        grid=(num_tokens,),
        grid_names=("token",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tiles.interpret_params(),
    )
    tokens_of_pages = (-1, num_kv_heads, 2, half) if by_token else (-1, num_kv_heads, page_size, 2, half)
    k_ref, v_ref = (jax.new_ref(pages.reshape(tokens_of_pages)) for pages in (k_layers, v_layers))
    q = run(qkv.reshape(num_tokens, num_heads, 2, half), cos, sin, slots, layer, k_ref, v_ref)
    k_pages, v_pages = jax.freeze(k_ref).reshape(k_pages.shape), jax.freeze(v_ref).reshape(v_pages.shape)
    return q.reshape(num_tokens, spec.num_q_heads, head_dim), k_pages, v_pages
