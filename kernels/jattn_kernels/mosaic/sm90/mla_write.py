"""What ends a latent row on Hopper, in one kernel: the norm of its compressed part, the turn of the rest, the write.

grid (tokens)    one warpgroup: a row in registers, the compressed part over all threads, the rest by each warp

As a step of few tokens waits for one round trip to memory here, all is asked for at once.
"""

import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.call import AttentionCall
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.mosaic.sm90.common.operands import stacked
from jattn_kernels.mosaic.sm90.rotate_and_write import halves_layout
from jattn_kernels.operands import LatentRowOperands
from jattn_kernels.splits import Splits

_THREADS, _MOST_AT_ONCE = 128, 8  # numbers that a thread loads at once
HALF = 32  # of the part that turns


def _layouts(compressed: int) -> tuple[Any, Any]:
    """Of the compressed part; of a half of the rest, which every warp has."""
    of_thread = compressed // _THREADS
    vector = next(size for size in (_MOST_AT_ONCE, 4, 2, 1) if of_thread % size == 0)
    return plgpu.Layout.WG_STRIDED((compressed,), vec_size=vector), halves_layout(4, HALF).reduce(0)


def mla_write(
    call: AttentionCall, operands: LatentRowOperands
) -> tuple[Float[Array, "T W"], Float[Array, "*L P page_size W"]]:
    """The rows, and the pages that have them at their slots."""
    latents, old = operands.latents, operands.pages
    rows, width, compressed = latents.rows, call.spec.head_dim, call.spec.value_dim
    num_tokens, dtype = rows.shape[0], latents.dtype
    layer, pages, _ = stacked(old, None, operands.layer_index)
    tokens_of_layer = pages.shape[1] * pages.shape[2]
    whole, turned = _layouts(compressed)
    scale, scale_layer = latents.scales()

    def kernel(rows_ref, cos_ref, sin_ref, scale_ref, scale_layer_ref, slots_ref, layer_ref, pages_ref, out_ref):
        token = lax.axis_index("token")
        slot = slots_ref[token]

        def load(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)

        def columns(begin, size, layout):
            place = pl.ds(begin, size)
            if not isinstance(rows, Splits):
                return load(rows_ref.at[token, place], layout)
            parts = [load(rows_ref.at[i, token, place], layout).astype(jnp.float32) for i in range(len(rows.parts))]
            return functools.reduce(operator.add, parts).astype(dtype)

        c_kv = columns(0, compressed, whole).astype(jnp.float32)
        first, second = (columns(begin, HALF, turned).astype(jnp.float32) for begin in (compressed, compressed + HALF))
        cos, sin = (load(ref.at[token], turned) for ref in (cos_ref, sin_ref))
        factor = load(scale_ref.at[scale_layer_ref[0]], whole).astype(jnp.float32)

        inverse = lax.rsqrt((c_kv * c_kv).sum() / compressed + latents.eps)
        made = (
            (0, (c_kv * inverse * factor).astype(dtype)),
            (compressed, (first * cos - second * sin).astype(dtype)),
            (compressed + HALF, (second * cos + first * sin).astype(dtype)),
        )
        for begin, numbers in made:
            out_ref[token, pl.ds(begin, numbers.shape[0])] = numbers

        @pl.when((slot >= 0) & (slot < tokens_of_layer))
        def write():
            row = layer_ref[0] * tokens_of_layer + slot
            for begin, numbers in made:
                pages_ref[row, pl.ds(begin, numbers.shape[0])] = numbers

    run = launch.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens, width), dtype),
        grid=(num_tokens,),
        grid_names=("token",),
        kernel_name="mla_write",
    )
    pages_ref = jax.new_ref(pages.reshape(-1, width))
    given = rows.parts if isinstance(rows, Splits) else rows
    places = (operands.slots, layer, pages_ref)
    out = run(given, latents.cos, latents.sin, scale, scale_layer.reshape(1), *places)
    (written,) = launch.frozen(pages_ref)
    return out, written.reshape(old.shape)
