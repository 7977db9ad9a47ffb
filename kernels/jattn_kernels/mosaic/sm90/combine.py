"""Merging the parts of split sequences on Hopper, in the order of the keys.

grid (blocks of rows, kv heads, sequences)     a vector is 128 or 256 numbers: one row, or two of width 64
one warpgroup; takes up to `_VECTORS` vectors where there are more of them than blocks at once
a sequence of one part is copied, others are merged `_PARTS` parts at a time, so that their loads overlap
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jattn_kernels.mosaic.sm90 import tiles

_THREADS = 128
_VECTORS = 4
_PARTS = 8
_BLOCKS_AT_ONCE = 132 * 16


def combine_parts(
    outs: Float[Array, "W K R Hv"],
    lses: Float[Array, "W K R"],
    offsets: Int[Array, " B_plus_1"],
    *,
    num_rows: int,
    heads_share_rows: bool,
    dtype: Any,
) -> tuple[Float[Array, "B K rows Hv"], Float[Array, "B K rows"]]:
    """Output in `dtype` and lse of each sequence from those of its parts; 0 and -inf where there are none.

    Args:
        offsets: Where each sequence's parts begin.
        num_rows: Rows that are wanted of the padded R.
        heads_share_rows: The R = 8 rows are those of several heads side by side, head h's own ones from
            h * num_rows % 8; otherwise the wanted rows come first.
    """
    num_parts, heads, padded_rows, width = outs.shape
    rows = max(1, _THREADS // width)  # of a vector
    lanes = rows * width
    layout = plgpu.Layout.WG_STRIDED((lanes,), vec_size=lanes // _THREADS)
    num_vectors = pl.cdiv(num_rows, rows)
    num_seqs = offsets.shape[0] - 1
    crowded = num_seqs * heads * num_vectors > _BLOCKS_AT_ONCE
    per_block = math.gcd(num_vectors, _VECTORS) if crowded else 1

    def kernel(outs_ref, lses_ref, offsets_ref, out_ref, lse_ref):
        sequence, head = lax.axis_index("sequence"), lax.axis_index("head")
        first, end = offsets_ref[sequence], offsets_ref[sequence + 1]
        skipped = lax.div(lax.rem(head * num_rows, padded_rows), rows) if heads_share_rows else 0
        vectors = [lax.axis_index("block") * per_block + i for i in range(per_block)]

        def load(part, vector):
            source = skipped + vector
            lse = [lses_ref[part, head, source * rows + row] for row in range(rows)]
            return lse, plgpu.load(outs_ref.at[part, head, source], layout=layout, optimized=False)

        def store(vector, lse, out):
            out_ref[sequence, head, vector] = out.astype(dtype)
            for row in range(rows):
                lse_ref[sequence, head, vector * rows + row] = lse[row]

        def merge(vector):
            start = (
                plgpu.layout_cast(jnp.zeros((lanes,), jnp.float32), layout),
                (jnp.float32(-jnp.inf),) * rows,
                (jnp.float32(0),) * rows,
            )
            merge_some = functools.partial(_merge_some, load=load, vector=vector, first=first, end=end, spread=spread)
            acc, top, total = lax.fori_loop(0, pl.cdiv(end - first, _PARTS), merge_some, start)
            safe_total = [jnp.where(a == 0, 1.0, a) for a in total]
            store(vector, [a + jnp.log(b) for a, b in zip(top, safe_total, strict=True)], acc / spread(safe_total))

        def spread(numbers):
            """One number a row, as a vector."""
            lane = plgpu.broadcasted_iota(jnp.int32, (lanes,), 0, layout=layout)
            vector = jnp.full((lanes,), numbers[-1])
            for row in reversed(range(rows - 1)):
                vector = jnp.where(lane < (row + 1) * width, numbers[row], vector)
            return vector

        @pl.when(end - first == 1)
        def copy():
            loaded = [load(first, vector) for vector in vectors]  # all in flight before the first is stored
            for vector, part in zip(vectors, loaded, strict=True):
                store(vector, *part)

        @pl.when(end - first != 1)
        def merge_all():
            for vector in vectors:
                merge(vector)

    run: Any = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((num_seqs, heads, num_vectors, lanes), dtype),
            jax.ShapeDtypeStruct((num_seqs, heads, num_vectors * rows), jnp.float32),
        ],
        grid=(num_vectors // per_block, heads, num_seqs),
        grid_names=("block", "head", "sequence"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tiles.interpret_params(),
    )
    out, lse = run(outs.reshape(num_parts, heads, padded_rows // rows, lanes), lses, offsets)
    return out.reshape(num_seqs, heads, -1, width)[:, :, :num_rows], lse[:, :, :num_rows]


def _merge_some(step, carry, *, load, vector, first, end, spread):
    """Takes the next `_PARTS` parts of a vector into the running result."""
    acc, top, total = carry
    loaded = []
    for i in range(_PARTS):
        part = first + step * _PARTS + i
        lse, out = load(jnp.minimum(part, end - 1), vector)
        loaded.append(([jnp.where(part < end, a, -jnp.inf) for a in lse], out))
    new_top = list(top)
    for lse, _ in loaded:
        new_top = [jnp.maximum(a, b) for a, b in zip(new_top, lse, strict=True)]
    shift = [jnp.where(a == -jnp.inf, 0.0, a) for a in new_top]
    keep = [jnp.exp(a - b) for a, b in zip(top, shift, strict=True)]
    acc = acc * spread(keep)
    total = [a * b for a, b in zip(total, keep, strict=True)]
    for lse, out in loaded:
        weight = [jnp.exp(a - b) for a, b in zip(lse, shift, strict=True)]
        total = [a + b for a, b in zip(total, weight, strict=True)]
        acc = acc + out * spread(weight)
    return acc, tuple(new_top), tuple(total)
