"""The merge of split sequences' results on Hopper, in the order of the keys, into the output (Flash-Decoding).

grid (vectors, kv heads, split sequences)      a vector is a multiple of 128 numbers: as few rows as make one, or a
                                               part of a wide row where there are few
one warpgroup; merges many splits at a time, so that their loads overlap, and what is left a few at a time; those of a
sequence that is alone, which has all workers, as many at a time as registers can take. Of wide rows a block does some
sequences in turn where thousands of blocks might have nothing to do
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jattn_kernels.lowering.split_schedule import DecodeSchedule
from jattn_kernels.mosaic.sm90.common import launch, tiles

_THREADS = 128
_WIDE, _FEW_ROWS = 512, 64  # numbers of a wide row; rows, of wide ones
_AT_A_TIME = (16, 4), (4,)  # splits; of wide rows
_BLOCKS_OF_SM = 16  # of one sequence each; 64 with nothing to do take 6 us, 16 of four sequences 2.5
_MOST_AT_A_TIME = 48  # each is a register of a thread for 128 numbers, and time to lower


class SplitResults(NamedTuple):
    """What a split-KV kernel leaves: sequences that are done, and splits of the others, each normalised by itself.

    Attributes:
        out: Of sequences of one split; whatever memory held, elsewhere.
        lse: Natural log; -inf where nothing is seen.
        split_outs: Of the splits of the other sequences.
        split_lses: Natural log.
    """

    out: Float[Array, "B K rows Hv"]
    lse: Float[Array, "B K rows"]
    split_outs: Float[Array, "W K R Hv"]
    split_lses: Float[Array, "W K R"]


def merge_splits(
    results: SplitResults,
    schedule: DecodeSchedule,
    *,
    batch_invariant: bool,
    sinks: Float32[Array, "L N"] | None = None,
    layer: Int[Array, "1"] | None = None,
) -> tuple[Float[Array, "B K rows Hv"], Float[Array, "B K rows"]]:
    """Output and natural-log lse of all sequences: the kernel's, with those of the split ones put in their places.

    Args:
        batch_invariant: Whether a sequence's splits are to be added in the same order whatever else is in the batch.
        sinks: Logits of heads that count in the denominator alone, and not in the lse, of all layers if of more than
            one; rows are those of the heads of a key head, of one token after another.
        layer: Which of them; given with them.
    """
    num_seqs, heads, num_rows, width = results.out.shape
    num_splits, _, padded_rows, _ = results.split_outs.shape
    alone = num_seqs == 1 and not batch_invariant
    lanes = _lanes(num_rows, width, alone=alone)
    rows, parts = max(1, lanes // width), max(1, width // lanes)  # of a vector; of a row
    layout = plgpu.Layout.WG_STRIDED((lanes,), vec_size=math.gcd(lanes // _THREADS, 8))
    num_vectors = num_rows // rows * parts
    most_split = schedule.split.shape[0]
    sequences = 1  # of a block
    if width >= _WIDE:
        sequences = max(1, num_vectors * heads * most_split // (_BLOCKS_OF_SM * tiles.num_sms()))
    num_blocks = pl.cdiv(most_split, sequences)
    at_a_time = (min(num_splits, _MOST_AT_A_TIME),) if alone else _AT_A_TIME[width >= _WIDE]

    group = 0 if sinks is None else sinks.shape[1] // heads

    def kernel(outs_ref, lses_ref, split_ref, *refs):
        *sinks_ref, out_ref, lse_ref = refs
        block, head, vector = (lax.axis_index(name) for name in ("split", "head", "vector"))
        only = [split_ref[block, field] for field in range(3)] if sequences == 1 else []
        # Heads that share padded rows have their own ones one after another.
        own = lax.rem(head * num_rows, padded_rows)
        source = (lax.div(own, rows) if parts == 1 else own * parts) + vector

        def row_of(vector, row):
            return vector * rows + row if parts == 1 else lax.div(vector, parts)

        def merge(sequence, first, end):
            def load(split):
                lse = [lses_ref[split, head, row_of(source, row)] for row in range(rows)]
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
            out = acc / spread(safe_l_i)
            if sinks_ref:  # they take a part of the denominator
                of_layer, number = sinks_ref
                own_layer = 0 if of_layer.shape[0] == 1 else number[0]
                lses = [m + jnp.log(a) for m, a in zip(m_i, safe_l_i, strict=True)]
                of_heads = [head * group + lax.rem(row_of(vector, row), group) for row in range(rows)]
                shares = [
                    jnp.where(lse == -jnp.inf, 0.0, 1.0 / (1.0 + jnp.exp(of_layer[own_layer, head] - lse)))
                    for head, lse in zip(of_heads, lses, strict=True)
                ]
                out = out * spread(shares)
            out_ref[sequence, head, vector] = out.astype(results.out.dtype)

            def store_lse():
                for row in range(rows):
                    lse_ref[sequence, head, row_of(vector, row)] = m_i[row] + jnp.log(safe_l_i[row])

            store_lse() if parts == 1 else pl.when(lax.rem(vector, parts) == 0)(store_lse)

        if sequences == 1:
            pl.when(only[0] >= 0)(functools.partial(merge, *only))
            return
        # The split ones come first: this block has every so many of them.
        places = [block + number * num_blocks for number in range(sequences)]
        last = most_split - 1
        count = sum(
            ((place <= last) & (split_ref[jnp.minimum(place, last), 0] >= 0)).astype(jnp.int32) for place in places
        )

        @pl.loop(0, count)
        def merge_own(number):
            merge(*(split_ref[block + number * num_blocks, field] for field in range(3)))

    def spread(numbers):
        """One number a row, as a vector."""
        lane = plgpu.broadcasted_iota(jnp.int32, (lanes,), 0, layout=layout)
        vector = jnp.full((lanes,), numbers[-1])
        for row in reversed(range(rows - 1)):
            vector = jnp.where(lane < (row + 1) * width, numbers[row], vector)
        return vector

    run = launch.kernel(
        kernel,
        grid=(num_vectors, heads, num_blocks),
        grid_names=("vector", "head", "split"),
        kernel_name="merge_splits",
    )
    outs = results.split_outs.reshape(num_splits, heads, padded_rows // rows * parts, lanes)
    out, lse = jax.new_ref(results.out.reshape(num_seqs, heads, num_vectors, lanes)), jax.new_ref(results.lse)
    run(outs, results.split_lses, schedule.split, *([] if sinks is None else [sinks, layer]), out, lse)
    merged, merged_lse = launch.frozen(out, lse)
    return merged.reshape(results.out.shape), merged_lse


def _lanes(num_rows: int, width: int, *, alone: bool) -> int:
    """Numbers of a vector."""
    if width >= _WIDE and alone and num_rows < _FEW_ROWS:
        return _THREADS
    return math.lcm(_THREADS, width)


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
