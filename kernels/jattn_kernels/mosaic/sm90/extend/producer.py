"""The producer warpgroup of the extend kernel: TMA copies of queries, keys and values, some tiles ahead."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common.row_copies import RowCopies
from jattn_kernels.mosaic.sm90.common.tiles import PageCopies, PoolPlace
from jattn_kernels.mosaic.sm90.extend.rows import CONSUMER_WARPGROUPS
from jattn_kernels.mosaic.sm90.extend.schedule import ExtendTiles, staged_pieces
from jattn_kernels.mosaic.sm90.extend.work_tile import Operands, TilePair, Tiles, WorkTile, clear_unowned
from jattn_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Producer:
    """What the producer warpgroup of a block has to do with.

    Attributes:
        heads: Heads that share a tile's rows.
        tile_tokens: Tokens of a tile.
        q_staging: Where the queries of each consumer warpgroup arrive.
        copied: Where tiles of keys and of values arrive.
        last_v_full: Values of a tile that is not whole have arrived, to be cleared before `full` says so; None if that
            is done elsewhere.
    """

    spec: AttentionSpec
    sizes: ExtendTiles
    copies: PageCopies | RowCopies
    heads: int
    tile_tokens: int
    operands: Operands
    q_staging: Any
    q_full: Any
    q_empty: Any
    copied: TilePair
    last_v_full: Any

    def run(self, work_tile: Callable[[Any], WorkTile], rounds: Any) -> None:
        """What the warpgroup does for all work tiles of its block.

        Args:
            work_tile: Gives the work tile of a round.
        """

        def load_work_tile(round, done):
            now = work_tile(round)
            begun = now.begun(done)
            self._load_work_tile(now, begun, is_first=round == 0)
            return begun + now.end_tile

        done = lax.fori_loop(0, rounds, load_work_tile, jnp.int32(0))
        for copied in self.copied:

            @pl.loop(jnp.maximum(done, copied.stages), done + copied.stages)
            def wait_for_the_last(step, copied=copied):
                plgpu.barrier_wait(copied.empty.at[copied.stage(step)])

        @pl.when(rounds > 0)
        def wait_for_the_last_queries():
            for warpgroup in range(CONSUMER_WARPGROUPS):
                plgpu.barrier_wait(self.q_empty.at[warpgroup])

    def _load_work_tile(self, work_tile: WorkTile, begun: Any, *, is_first: Any) -> None:
        """Queries, then k and v a tile at a time; k of a tile comes before v of the one before it.

        Args:
            begun: The number of the work tile's tile 0 among all tiles of the block.
            is_first: Whether it is the block's first work tile.
        """
        self._load_queries(work_tile, is_first)

        def load_tile(tile, pages):
            following = self._pages(work_tile, tile + 1)  # they come from memory: ask for them a tile ahead
            self._load_v(work_tile, begun, tile, pages)
            pl.when(tile + 1 < work_tile.end_tile)(lambda: self._load_k(work_tile, begun, tile + 1, following))
            return following

        first = self._pages(work_tile, work_tile.begin_tile)
        pl.when(work_tile.end_tile > work_tile.begin_tile)(
            lambda: self._load_k(work_tile, begun, jnp.int32(work_tile.begin_tile), first)
        )
        lax.fori_loop(work_tile.begin_tile, work_tile.end_tile, load_tile, first)

    def _load_queries(self, work_tile: WorkTile, is_first: Any) -> None:
        """Rows of both tiles, head by head; columns that staging memory has no room for follow the first."""
        width = self.q_staging.shape[-1]
        for column in staged_pieces(self.operands.q.shape[-1], width):
            for warpgroup in range(CONSUMER_WARPGROUPS):
                taken = self.q_empty.at[warpgroup]
                pl.when((column > 0) | jnp.logical_not(is_first))(lambda taken=taken: plgpu.barrier_wait(taken))
                # A tile without tokens gets the other's: it takes part in the handshake.
                skipped = warpgroup * self.tile_tokens
                first = work_tile.first + jnp.where(work_tile.tokens > skipped, skipped, 0)

                @pl.loop(0, self.heads)
                def load_head(h, column=column, warpgroup=warpgroup, first=first):
                    tokens = pl.ds(first, self.tile_tokens)
                    source = self.operands.q.at[tokens, work_tile.heads * self.heads + h, pl.ds(column, width)]
                    rows = pl.ds(h * self.tile_tokens, self.tile_tokens)
                    plgpu.copy_gmem_to_smem(source, self.q_staging.at[warpgroup, rows], self.q_full.at[warpgroup])

    def _load_k(self, work_tile: WorkTile, begun: Any, tile: Any, pages: list[Any]) -> None:
        keys = self.copied.keys
        stage = self._stage(keys, begun + tile)
        self._start(work_tile, 0, pages, tile, keys.smem.at[stage], keys.full.at[stage])

    def _load_v(self, work_tile: WorkTile, begun: Any, tile: Any, pages: list[Any]) -> None:
        """A tile of v; what lies before the first key and past the last is cleared."""
        v_smem, v_full, _ = self.copied.values
        stage = self._stage(self.copied.values, begun + tile)
        if self.last_v_full is None:
            self._start(work_tile, 1, pages, tile, v_smem.at[stage], v_full.at[stage])
            return
        is_whole = work_tile.owns(tile, self.sizes.block_kv)

        @pl.when(is_whole)
        def whole_tile():
            self._start(work_tile, 1, pages, tile, v_smem.at[stage], v_full.at[stage])

        @pl.when(jnp.logical_not(is_whole))
        def partly_filled_tile():
            self._start(work_tile, 1, pages, tile, v_smem.at[stage], self.last_v_full)
            plgpu.barrier_wait(self.last_v_full)
            clear_unowned(v_smem.at[stage], work_tile, tile)
            for _ in range(self.copies.copies):
                plgpu.barrier_arrive(v_full.at[stage])

    def _stage(self, copied: Tiles, step: Any) -> Any:
        """Where the block's next tile goes, once it may be overwritten."""
        stage = copied.stage(step)
        pl.when(step >= copied.stages)(lambda: plgpu.barrier_wait(copied.empty.at[stage]))
        return stage

    def _start(self, work_tile: WorkTile, of_values: int, pages: list[Any], tile: Any, smem: Any, barrier: Any) -> None:
        source = (self.operands.k, self.operands.v)[of_values]
        place = PoolPlace(self.operands.layer[0], work_tile.kv_head(self.spec, self.heads), of_values)
        self.copies.start(source, place, pages, tile, smem, barrier)

    def _pages(self, work_tile: WorkTile, tile: Any) -> list[jax.Array]:
        return self.copies.pages(self.operands.places, work_tile.sequence, tile, work_tile.kv_len - 1)
