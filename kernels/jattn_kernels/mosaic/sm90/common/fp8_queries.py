"""Queries as sums of fp8 numbers on Hopper, where their rows stay as they are: one kernel, where XLA makes several.

grid (kv heads, sequences)      one warpgroup: the queries of a kv head, all of them in registers; their largest number,
                                the power of two that they are divided by, and their parts
"""

import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.lowering.fp8_parts import (
    EXPONENT,
    MANTISSA_BITS,
    NARROW_SIZE,
    SIZES,
    leading_bits,
    num_parts,
)
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.spec import AttentionSpec

_THREADS = 128
_MOST_NUMBERS = 64 * _THREADS  # of a head: 64 registers of a thread
_ONE = 127 << MANTISSA_BITS  # the bits of 1.0


def supports(q_dtype: Any, dtype: Any, spec: AttentionSpec) -> bool:
    """Whether there is a kernel for such queries and parts of a dtype: each thread has pairs of a head's numbers."""
    numbers = spec.group_size * spec.head_dim
    is_wide = q_dtype in (jnp.bfloat16, jnp.float16) and jnp.dtype(dtype).itemsize == 1
    return is_wide and numbers % (2 * _THREADS) == 0 and numbers <= _MOST_NUMBERS


def split_queries(
    q: Float[Array, "B N H"], dtype: Any, factor: Float[Array, "_B K"] | None, spec: AttentionSpec
) -> tuple[Float[Array, "B parts N H"], Float[Array, "B K"]]:
    """The parts of `in_parts`, and its powers of two, times a factor of each sequence (or of all) and kv head."""
    batch_size, parts, heads = q.shape[0], num_parts(q.dtype, dtype), spec.num_kv_heads
    numbers = spec.group_size * spec.head_dim
    layout = plgpu.Layout.WG_STRIDED((numbers,), vec_size=math.gcd(numbers // _THREADS, 8))
    least, most = (math.frexp(size)[1] - 1 << MANTISSA_BITS for size in SIZES)
    narrow = round(math.log2(NARROW_SIZE)) << MANTISSA_BITS

    def kernel(q_ref, *refs):
        factor_ref, (parts_ref, size_ref) = refs[:-2], refs[-2:]
        sequence, head = (lax.axis_index(name) for name in ("sequence", "head"))
        rest = plgpu.load(q_ref.at[sequence, head], layout=layout, optimized=False).astype(jnp.float32)
        # Numbers without a sign rise as their bits do.
        largest = (lax.bitcast_convert_type(rest, jnp.int32) & 0x7FFFFFFF).max() & EXPONENT
        size = jnp.where(largest == 0, _ONE, jnp.clip(largest, _ONE + least, _ONE + most)) - narrow
        # Times one over it, which is exact and never subnormal.
        rest *= float_of(2 * _ONE - size)
        for part in range(parts):
            number = leading_bits(rest, dtype)
            parts_ref[sequence, part, head] = number.astype(dtype)
            rest -= number
        size = float_of(size).max()
        for ref in factor_ref:
            size *= ref[jnp.minimum(sequence, ref.shape[0] - 1), head]
        size_ref[sequence, head] = size

    def float_of(bits):
        """What a number's bits mean, as a vector: of one alone Mosaic does not know it."""
        return lax.bitcast_convert_type(jnp.full((numbers,), bits), jnp.float32)

    run = launch.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((batch_size, parts, heads, numbers), dtype),
            jax.ShapeDtypeStruct((batch_size, heads), jnp.float32),
        ],
        grid=(heads, batch_size),  # the last axis may be long
        grid_names=("head", "sequence"),
        kernel_name="split_queries",
    )
    split, size = run(q.reshape(batch_size, heads, numbers), *(() if factor is None else (factor,)))
    return split.reshape(batch_size, parts, *q.shape[1:]), size
