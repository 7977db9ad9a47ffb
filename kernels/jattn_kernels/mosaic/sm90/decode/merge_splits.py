"""The merge of split sequences' results on Hopper, in the order of the keys, into decode's output (Flash-Decoding).

grid (vectors, kv heads, split sequences)      a vector is a multiple of 128 numbers: as few rows as make one
one warpgroup; merges many splits at a time, so that their loads overlap, and what is left a few at a time; those of a
sequence that is alone, which has all workers, as many at a time as registers can take
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.lowering.split_schedule import DecodeSchedule
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.mosaic.sm90.decode.kernel import SplitResults

_THREADS = 128
_AT_A_TIME = (16, 4)  # splits
_MOST_AT_A_TIME = 48  # each is a register of a thread for 128 numbers, and time to lower


def merge_splits(
    results: SplitResults, schedule: DecodeSchedule, *, batch_invariant: bool
) -> tuple[Float[Array, "B K rows Hv"], Float[Array, "B K rows"]]:
    """Output and natural-log lse of all sequences: decode's, with those of the split ones put in their places.

    Args:
        batch_invariant: Whether a sequence's splits are to be added in the same order whatever else is in the batch.
    """
    num_seqs, heads, num_rows, width = results.out.shape
    num_splits, _, padded_rows, _ = results.split_outs.shape
    rows = math.lcm(_THREADS, width) // width  # of a vector
    lanes = rows * width
    layout = plgpu.Layout.WG_STRIDED((lanes,), vec_size=math.gcd(lanes // _THREADS, 8))
    num_vectors = num_rows // rows
    alone = num_seqs == 1 and not batch_invariant
    at_a_time = (min(num_splits, _MOST_AT_A_TIME),) if alone else _AT_A_TIME

    def kernel(outs_ref, lses_ref, split_ref, out_ref, lse_ref):
        place, head, vector = (lax.axis_index(name) for name in ("split", "head", "vector"))
        sequence, first, end = (split_ref[place, field] for field in range(3))
        # Heads that share padded rows have their own ones one after another.
        source = lax.div(lax.rem(head * num_rows, padded_rows), rows) + vector

        @pl.when(sequence >= 0)
        def merge():
            def load(split):
                lse = [lses_ref[split, head, source * rows + row] for row in range(rows)]
                return lse, plgpu.load(outs_ref.at[split, head, source], layout=layout, optimized=False)

            carry = (
                plgpu.layout_cast(jnp.zeros((lanes,), jnp.float32), layout),
                (jnp.float32(-jnp.inf),) * rows,
                (jnp.float32(0),) * rows,
            )
            rest = first  # what is left of the splits begins there
            for splits_at_once in at_a_time:
                is_last = splits_at_once == at_a_time[-1]
                steps = pl.cdiv(end - rest, splits_at_once) if is_last else lax.div(end - rest, splits_at_once)
                merge_more = functools.partial(
                    _merge_some, load=load, first=rest, end=end, spread=spread, num_splits=splits_at_once
                )
                carry = lax.fori_loop(0, steps, merge_more, carry)
                rest += steps * splits_at_once
            acc, m_i, l_i = carry
            safe_l_i = [jnp.where(a == 0, 1.0, a) for a in l_i]
            out_ref[sequence, head, vector] = (acc / spread(safe_l_i)).astype(results.out.dtype)
            for row in range(rows):
                lse_ref[sequence, head, vector * rows + row] = m_i[row] + jnp.log(safe_l_i[row])

    def spread(numbers):
        """One number a row, as a vector."""
        lane = plgpu.broadcasted_iota(jnp.int32, (lanes,), 0, layout=layout)
        vector = jnp.full((lanes,), numbers[-1])
        for row in reversed(range(rows - 1)):
            vector = jnp.where(lane < (row + 1) * width, numbers[row], vector)
        return vector

    run = launch.kernel(
        kernel,
        grid=(num_vectors, heads, schedule.split.shape[0]),
        grid_names=("vector", "head", "split"),
        kernel_name="merge_splits",
    )
    outs = results.split_outs.reshape(num_splits, heads, padded_rows // rows, lanes)
    out, lse = jax.new_ref(results.out.reshape(num_seqs, heads, num_vectors, lanes)), jax.new_ref(results.lse)
    run(outs, results.split_lses, schedule.split, out, lse)
    merged, merged_lse = launch.frozen(out, lse)
    return merged.reshape(results.out.shape), merged_lse


def _merge_some(step, carry, *, load, first, end, spread, num_splits):
    """Takes the next `num_splits` splits into the running result."""
    acc, m_i, l_i = carry
    loaded = []
    for i in range(num_splits):
        split = first + step * num_splits + i
        lse, out = load(jnp.minimum(split, end - 1))
        loaded.append(([jnp.where(split < end, a, -jnp.inf) for a in lse], out))
    m_new = list(m_i)
    for lse, _ in loaded:
        m_new = [jnp.maximum(a, b) for a, b in zip(m_new, lse, strict=True)]
    shift = [jnp.where(a == -jnp.inf, 0.0, a) for a in m_new]
    alpha = [jnp.exp(a - b) for a, b in zip(m_i, shift, strict=True)]
    acc = acc * spread(alpha)
    l_i = [a * b for a, b in zip(l_i, alpha, strict=True)]
    for lse, out in loaded:
        weight = [jnp.exp(a - b) for a, b in zip(lse, shift, strict=True)]
        l_i = [a + b for a, b in zip(l_i, weight, strict=True)]
        acc = acc + out * spread(weight)
    return acc, tuple(m_new), tuple(l_i)
