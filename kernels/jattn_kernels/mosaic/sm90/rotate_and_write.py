"""Rotary embedding and the write of keys and values into their pages, in one kernel.

grid (blocks, tokens)    one warpgroup: takes a few heads of a token at a time as two halves, rotates them in registers,
                         and puts them where they belong: into q, or into the token's place in the pages

A step of few tokens waits for nothing here but one round trip to memory: so everything is asked for at once, nothing
goes by way of shared memory, and few tokens are spread over many blocks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.call import AttentionCall
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.operands import stacked
from jattn_kernels.operands import RotaryOperands
from jattn_kernels.spec import AttentionSpec

_THREADS, _LANES = 128, 32
_BLOCKS_PER_SM = 4  # as many as run at a time and finish soon


def heads_at_once(spec: AttentionSpec) -> int | None:
    """Heads that are rotated together, so that all threads have the same to do; None if the head counts forbid it."""
    common, least = math.gcd(spec.num_q_heads, spec.num_kv_heads), _THREADS // (spec.head_dim // 2)
    if common % tiles.WARPS == 0:
        return tiles.WARPS
    return None if common % least else least


def _layout(heads: int, half: int) -> Any:
    """Halves of heads, row after row, spread over the threads: a warp takes a row, or a piece of one."""
    numbers = heads * half // _THREADS  # that a thread takes at once
    if heads == tiles.WARPS:
        return plgpu.Layout.TILED(plgpu.Tiling(((heads, half), (numbers,))), (-3,), (-2,), -1)
    tiling = plgpu.Tiling(((heads, half), (_LANES * numbers,), (numbers,)))
    return plgpu.Layout.TILED(tiling, (-4, -3) if heads > 1 else (-3,), (-2,), -1)


def _when(condition: Any, act: Callable[[], None]) -> None:
    """`pl.when`, but what is known while tracing leaves nothing for the device to ask."""
    if not isinstance(condition, bool):
        pl.when(condition)(act)
    elif condition:
        act()


def rotate_and_write(
    call: AttentionCall, operands: RotaryOperands
) -> tuple[Float[Array, "T N H"], Float[Array, "..."], Float[Array, "..."]]:
    """Rotated queries, and the pages with the token's rotated keys and its values at their slots."""
    spec, qkv, k_pages, v_pages = call.spec, operands.qkv, operands.k_pages, operands.v_pages
    num_tokens, num_heads, head_dim = qkv.shape
    half, num_q_heads, num_kv_heads = head_dim // 2, spec.num_q_heads, spec.num_kv_heads
    first_value = num_q_heads + num_kv_heads
    at_once = heads_at_once(spec)
    assert at_once is not None
    by_token = spec.page_layout == "NHD"
    layer, k_layers, v_layers = stacked(k_pages, v_pages, operands.layer_index)
    num_pages, page_size = k_layers.shape[1], k_layers.shape[2 if by_token else 3]
    groups = num_heads // at_once
    divisors = (n for n in range(1, groups + 1) if groups % n == 0)
    most_blocks = _BLOCKS_PER_SM * tiles.num_sms()
    groups_per_block = next((n for n in divisors if num_tokens * groups <= n * most_blocks), groups)
    layout = _layout(at_once, half)
    of_token = layout.reduce(0)

    def kernel(qkv_ref, cos_ref, sin_ref, slots_ref, layer_ref, k_ref, v_ref, q_ref):
        token, block = lax.axis_index("token"), lax.axis_index("block")
        slot = slots_ref[token]
        is_written = (slot >= 0) & (slot < num_pages * page_size)

        def load_heads(first):
            return [
                plgpu.load(qkv_ref.at[token, pl.ds(first, at_once), part], layout=layout, optimized=False)
                for part in range(2)
            ]

        # Where a block takes all heads of a token, it is known here whose they are.
        begun = 0 if groups_per_block == groups else block * groups_per_block * at_once
        came = [(begun + n * at_once, load_heads(begun + n * at_once)) for n in range(groups_per_block)]
        cos, sin = (
            lax.broadcast_in_dim(plgpu.load(ref.at[token], layout=of_token, optimized=False), (at_once, half), [1])
            for ref in (cos_ref, sin_ref)
        )

        def rotated(halves):
            first, second = (part.astype(jnp.float32) for part in halves)
            return [half.astype(qkv.dtype) for half in (first * cos - second * sin, second * cos + first * sin)]

        def write(pages_ref, first, halves):
            for part, numbers in enumerate(halves):
                heads = pl.ds(first, at_once)
                if by_token:
                    pages_ref[layer_ref[0] * (num_pages * page_size) + slot, heads, part] = numbers
                else:
                    page = layer_ref[0] * num_pages + lax.div(slot, page_size)
                    pages_ref[page, heads, lax.rem(slot, page_size), part] = numbers

        def write_queries(first, halves):
            for part, numbers in enumerate(rotated(halves)):
                q_ref[token, pl.ds(first, at_once), part] = numbers

        def write_keys(first, halves):
            pl.when(is_written)(lambda: write(k_ref, first - num_q_heads, rotated(halves)))

        def write_values(first, halves):
            pl.when(is_written)(lambda: write(v_ref, first - first_value, halves))

        for first, halves in came:
            _when(first < num_q_heads, functools.partial(write_queries, first, halves))
            _when((first >= num_q_heads) & (first < first_value), functools.partial(write_keys, first, halves))
            _when(first >= first_value, functools.partial(write_values, first, halves))

    run = launch.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens, num_q_heads, 2, half), qkv.dtype),
        grid=(groups // groups_per_block, num_tokens),  # the last axis may be long
        grid_names=("block", "token"),
        kernel_name="rotate_and_write",
    )
    tokens_of_pages = (-1, num_kv_heads, 2, half) if by_token else (-1, num_kv_heads, page_size, 2, half)
    k_ref, v_ref = (jax.new_ref(pages.reshape(tokens_of_pages)) for pages in (k_layers, v_layers))
    halves = qkv.reshape(num_tokens, num_heads, 2, half)
    q = run(halves, operands.cos, operands.sin, operands.slots, layer, k_ref, v_ref)
    written = launch.frozen(k_ref, v_ref)
    k_pages, v_pages = (new.reshape(old.shape) for new, old in zip(written, (k_pages, v_pages), strict=True))
    return q.reshape(num_tokens, num_q_heads, head_dim), k_pages, v_pages
