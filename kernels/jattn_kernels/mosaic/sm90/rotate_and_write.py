"""Rotary embedding and the write of keys and values into their pages, in one kernel.

grid (blocks, tokens)    one warpgroup: takes a few heads of a token at a time as two halves, norms them if asked to and
                         rotates them in registers, and puts them where they belong: into q, or into the token's place
                         in the pages

A step of few tokens waits for nothing here but one round trip to memory: so everything is asked for at once, nothing
goes by way of shared memory, and few tokens are spread over many blocks.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.call import AttentionCall
from jattn_kernels.head_norms import HeadNorms
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.operands import stacked
from jattn_kernels.operands import RotaryOperands
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.splits import Splits

_THREADS, _LANES = 128, 32
_BLOCKS_PER_SM = 4  # as many as run at a time and finish soon


def heads_at_once(spec: AttentionSpec) -> int | None:
    """Heads that are rotated together, so that all threads have the same to do; None if the head counts forbid it."""
    common, least = math.gcd(spec.num_q_heads, spec.num_kv_heads), _THREADS // (spec.head_dim // 2)
    if common % tiles.WARPS == 0:
        return tiles.WARPS
    return None if common % least else least


def halves_layout(heads: int, half: int) -> Any:
    """Halves of heads, row after row, spread over the threads: a warp takes a row, or a piece of one."""
    numbers = heads * half // _THREADS  # that a thread takes at once
    if heads == tiles.WARPS:
        return plgpu.Layout.TILED(plgpu.Tiling(((heads, half), (numbers,))), (-3,), (-2,), -1)
    tiling = plgpu.Tiling(((heads, half), (_LANES * numbers,), (numbers,)))
    return plgpu.Layout.TILED(tiling, (-4, -3) if heads > 1 else (-3,), (-2,), -1)


def _scales(norms: HeadNorms | None, half: int) -> tuple[Any, ...]:
    """Both scales in halves, and the number of the layer; nothing if there are none."""
    scales = None if norms is None else norms.scales()
    if scales is None:
        return ()
    *stacks, layer = scales
    return (*(stack.reshape(-1, 2, half) for stack in stacks), layer.reshape(1))


def normed_halves(halves: list[Any], norms: HeadNorms, scales: list[Any] | None) -> list[Any]:
    """Halves of heads over their root mean square, rounded as a norm by itself rounds them."""
    wide = [part.astype(jnp.float32) for part in halves]
    shape, dtype = wide[0].shape, halves[0].dtype
    squares = (wide[0] * wide[0] + wide[1] * wide[1]).sum(axis=1)
    inverse = lax.broadcast_in_dim(lax.rsqrt(squares / (2 * shape[1]) + norms.eps), shape, [0])
    factors = (1.0, 1.0) if scales is None else [scale.astype(jnp.float32) + norms.offset for scale in scales]
    return [(part * inverse * factor).astype(dtype) for part, factor in zip(wide, factors, strict=True)]


def stored(numbers: Any, dtype: Any) -> Any:
    """Numbers as pages hold them; of fp8 none is larger than the largest one."""
    if numbers.dtype == dtype:
        return numbers
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(numbers.astype(jnp.float32), -largest, largest).astype(dtype)


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
    layout = halves_layout(at_once, half)
    of_token = layout.reduce(0)
    norms, scales = operands.norms, _scales(operands.norms, half)

    def kernel(qkv_ref, cos_ref, sin_ref, slots_ref, layer_ref, *refs):
        *scale_refs, k_ref, v_ref, q_ref = refs
        token, block = lax.axis_index("token"), lax.axis_index("block")
        slot = slots_ref[token]
        is_written = (slot >= 0) & (slot < num_pages * page_size)

        def load_heads(first):
            def load(ref, part):
                return plgpu.load(ref.at[token, pl.ds(first, at_once), part], layout=layout, optimized=False)

            if not isinstance(qkv, Splits):
                return [load(qkv_ref, part) for part in range(2)]
            splits = [
                [load(qkv_ref.at[i], part).astype(jnp.float32) for part in range(2)] for i in range(len(qkv.parts))
            ]
            return [functools.reduce(operator.add, halves).astype(qkv.dtype) for halves in zip(*splits, strict=True)]

        # Where a block takes all heads of a token, it is known here whose they are.
        begun = 0 if groups_per_block == groups else block * groups_per_block * at_once
        came = [(begun + n * at_once, load_heads(begun + n * at_once)) for n in range(groups_per_block)]

        def of_all_heads(ref):
            return lax.broadcast_in_dim(plgpu.load(ref, layout=of_token, optimized=False), (at_once, half), [1])

        cos, sin = (of_all_heads(ref.at[token]) for ref in (cos_ref, sin_ref))
        q_scale, k_scale = None, None
        if scale_refs:
            *stacks, norm_layer = scale_refs
            q_scale, k_scale = ([of_all_heads(ref.at[norm_layer[0], part]) for part in range(2)] for ref in stacks)

        def rotated(halves, scale):
            if norms is not None:
                halves = normed_halves(halves, norms, scale)
            first, second = (part.astype(jnp.float32) for part in halves)
            return [half.astype(qkv.dtype) for half in (first * cos - second * sin, second * cos + first * sin)]

        def write(pages_ref, first, halves):
            for part, numbers in enumerate(stored(half, k_pages.dtype) for half in halves):
                heads = pl.ds(first, at_once)
                if by_token:
                    pages_ref[layer_ref[0] * (num_pages * page_size) + slot, heads, part] = numbers
                else:
                    page = layer_ref[0] * num_pages + lax.div(slot, page_size)
                    pages_ref[page, heads, lax.rem(slot, page_size), part] = numbers

        def write_queries(first, halves):
            for part, numbers in enumerate(rotated(halves, q_scale)):
                q_ref[token, pl.ds(first, at_once), part] = numbers

        def write_keys(first, halves):
            pl.when(is_written)(lambda: write(k_ref, first - num_q_heads, rotated(halves, k_scale)))

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
    given = halves.parts if isinstance(halves, Splits) else halves
    q = run(given, operands.cos, operands.sin, operands.slots, layer, *scales, k_ref, v_ref)
    written = launch.frozen(k_ref, v_ref)
    k_pages, v_pages = (new.reshape(old.shape) for new, old in zip(written, (k_pages, v_pages), strict=True))
    return q.reshape(num_tokens, num_q_heads, head_dim), k_pages, v_pages
