"""The epilogue of extend: what the rows of a warpgroup's tile summed, divided by their sums and stored by token."""

import dataclasses
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common.logits import LOG2E
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.extend.schedule import staged_pieces
from jattn_kernels.mosaic.sm90.extend.work_tile import WorkTile
from jattn_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
    """Where results go.

    Attributes:
        heads: Heads that share a tile's rows.
        tile_tokens: Tokens that a tile has room for.
        out: By token.
        lse: As the kernel gives it.
        out_factor: Of a value head; None if there is none.
    """

    spec: AttentionSpec
    heads: int
    tile_tokens: int
    out: Any
    lse: Any
    out_factor: Any

    def store(
        self, work_tile: WorkTile, warpgroup: Any, skipped: Any, tokens: Any, staging: Any, sums: tuple[Any, Any, Any]
    ) -> None:
        """Stores the results of a warpgroup's tile.

        Args:
            skipped: Tokens of the work tile that come before it.
            tokens: How many it has.
            staging: Its staging memory.
            sums: acc, m_i and l_i of its rows.
        """
        acc, m_i, l_i = sums
        empty = m_i == -jnp.inf
        safe_l_i = jnp.where(empty, 1.0, l_i)
        lse = jnp.where(empty, -jnp.inf, (m_i + jnp.log2(safe_l_i)) / LOG2E)
        self.lse[work_tile.query_block, work_tile.heads, warpgroup] = lse
        share = 1.0 / safe_l_i
        if self.out_factor is not None:
            share = share * self.out_factor[work_tile.kv_head(self.spec, self.heads)]
        outs = [(part * lax.broadcast_in_dim(share, part.shape, [0])).astype(self.out.dtype) for part in acc]
        self._store_rows(outs, work_tile.first + skipped, tokens, work_tile.heads * self.heads, staging)

    def _store_rows(self, outs: list[Any], first: Any, tokens: Any, head: Any, staging: Any) -> None:
        """The first `tokens` tokens of each head: those behind them belong to another block."""
        width = staging.shape[-1]
        for column in staged_pieces(self.spec.value_dim, width):
            out, begin = outs[column // outs[0].shape[1]], column % outs[0].shape[1]
            part = lax.slice(out, (0, begin), (WGMMA_ROWS, begin + width)) if out.shape[1] > width else out
            if column:
                plgpu.wait_smem_to_gmem(0)
            staging[pl.ds(0, WGMMA_ROWS)] = part
            plgpu.commit_smem()
            for bit in range(self.tile_tokens.bit_length()):
                size = 1 << bit
                done = lax.div(tokens, 2 * size) * (2 * size)

                @pl.when((tokens & size) != 0)
                def store_piece(size=size, done=done, column=column):
                    @pl.loop(0, self.heads)
                    def store_head(h):
                        target = self.out.at[pl.ds(first + done, size), head + h, pl.ds(column, width)]
                        plgpu.copy_smem_to_gmem(staging.at[pl.ds(h * self.tile_tokens + done, size)], target)
