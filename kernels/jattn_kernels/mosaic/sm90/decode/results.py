"""What a consumer warpgroup of the decode kernel makes of its keys: given to the first one, merged, and stored."""

import math
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import turned_values
from jattn_kernels.mosaic.sm90.common.logits import LOG2E
from jattn_kernels.mosaic.sm90.common.work_tiles import WorkTile
from jattn_kernels.mosaic.sm90.decode.config import DecodeConfig, Operands, SharedMemory

_THREADS = 128
_OF_ROWS = plgpu.Layout.WGMMA.reduce(0)


class State(NamedTuple):
    """Of some keys: unnormalised output, and each row's largest logit m_i in base 2 and sum l_i of exponentials."""

    acc: Any  # [width, rows] float32
    m_i: Any  # [rows]
    l_i: Any  # [block_kv, rows], summed over keys in the end: [rows]


class Results:
    """Those of one consumer warpgroup.

    Args:
        number: Which one.
        place: The block's key head and its block of rows.
    """

    def __init__(self, config: DecodeConfig, operands: Operands, scratch: SharedMemory, number: int, place: Any):
        self._config, self._operands, self._scratch, self._number = config, operands, scratch, number
        self._head, self._row_block = place

    def send_partial(self, state: State, *, is_first) -> None:
        """Gives this warpgroup's part of a work tile to the first one, normalised: one number a row goes with it."""
        which = self._number - 1
        out, log_sum = self._normalised(state)
        pl.when(jnp.logical_not(is_first))(lambda: plgpu.barrier_wait(self._scratch.partials_empty.at[which]))
        out_smem, log_sum_smem = self._scratch.partials
        out_smem[which] = plgpu.layout_cast(out, plgpu.Layout.WGMMA)
        log_sum_smem[which] = plgpu.layout_cast(log_sum, _OF_ROWS)
        plgpu.barrier_arrive(self._scratch.partials_full.at[which])

    def merged(self, state: State, other: int) -> State:
        """The first warpgroup's part of a work tile with another's, always in this order."""
        which = other - 1
        own_out, own_sum = self._normalised(state)
        plgpu.barrier_wait(self._scratch.partials_full.at[which])
        out_smem, log_sum_smem = self._scratch.partials
        out = plgpu.load(out_smem.at[which], layout=plgpu.Layout.WGMMA, optimized=False)
        log_sum = plgpu.load(log_sum_smem.at[which], layout=_OF_ROWS, optimized=False)
        plgpu.barrier_arrive(self._scratch.partials_empty.at[which])
        m_i = jnp.maximum(own_sum, log_sum)
        shift = jnp.where(m_i == -jnp.inf, 0.0, m_i)
        own_weight, weight = jnp.exp2(own_sum - shift), jnp.exp2(log_sum - shift)
        acc = own_out * lax.broadcast_in_dim(own_weight, out.shape, [1]) + out * lax.broadcast_in_dim(
            weight, out.shape, [1]
        )
        return State(plgpu.layout_cast(acc, plgpu.Layout.WGMMA), m_i, plgpu.layout_cast(own_weight + weight, _OF_ROWS))

    def _normalised(self, state: State):
        """Output, and the logarithm in base 2 of each row's sum of exponentials; 0 and -inf where it sees nothing."""
        empty = state.m_i == -jnp.inf
        safe_l_i = jnp.where(empty, 1.0, state.l_i)
        out = state.acc / lax.broadcast_in_dim(safe_l_i, state.acc.shape, [1])
        return out, jnp.where(empty, -jnp.inf, state.m_i + jnp.log2(safe_l_i))

    def _share_of_keys(self, lse):
        """The part of each row's denominator that is keys and not its sink."""
        rows, sinks = self._config.rows_of_block(self._head, self._row_block), self._operands.sinks
        layer = 0 if sinks.shape[0] == 1 else self._operands.layer[0]
        sinks = plgpu.load(sinks.at[layer, rows], layout=_OF_ROWS, optimized=False)
        return jnp.where(lse == -jnp.inf, 0.0, 1.0 / (1.0 + jnp.exp(sinks - lse)))

    def store(self, state: State, out_refs, work_tile: WorkTile, number) -> None:
        """The result of a work tile: where the sequence's lies, or among the splits."""
        config, head, row_block = self._config, self._head, self._row_block
        out_ref, lse_ref, split_outs_ref, split_lses_ref = out_refs
        out_smem, lse_smem = self._scratch.result
        out, log_sum = self._normalised(state)
        if self._operands.out_factor is not None:
            out = out * self._operands.out_factor[head]
        if self._operands.sinks is not None:  # splits' are taken in by their merge
            share = (self._share_of_keys(log_sum / LOG2E) - 1.0) * jnp.where(work_tile.splits > 1, 0.0, 1.0) + 1.0
            out = out * lax.broadcast_in_dim(share, out.shape, [1])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last work tile's
        if config.turns:
            turned_values.store_product(plgpu.layout_cast(out, plgpu.Layout.WGMMA), out_smem)
        else:
            out_smem.transpose((1, 0))[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        lse_smem[...] = log_sum / LOG2E
        plgpu.commit_smem()

        @pl.when(work_tile.splits > 1)
        def store_split():
            rows = pl.ds(row_block * config.sizes.block_rows, config.sizes.block_rows)
            plgpu.copy_smem_to_gmem(out_smem, split_outs_ref.at[number, head, rows])
            plgpu.copy_smem_to_gmem(lse_smem, split_lses_ref.at[number, head, rows])

        @pl.when(work_tile.splits == 1)
        def store_sequence():
            own = lax.rem(head, config.heads_per_block) * config.rows
            shape = (config.rows, config.width)
            layout = plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(math.prod(shape) // _THREADS, 8))
            result = plgpu.load(out_smem.at[pl.ds(own, config.rows)], layout=layout, optimized=False)
            out_ref[work_tile.sequence, head, pl.ds(row_block * config.rows, config.rows)] = result.astype(
                config.out_dtype
            )
            for row in range(config.rows):
                lse_ref[work_tile.sequence, head, row_block * config.rows + row] = lse_smem[own + row]
