"""The producer warpgroup of the latent kernel: TMA copies of queries and of latent rows, a pair of tiles ahead."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import PoolPlace
from jattn_kernels.mosaic.sm90.common.work_tiles import WorkTile, WorkTiles, walk
from jattn_kernels.mosaic.sm90.mla.config import (
    BLOCK_ROWS,
    CONSUMERS,
    LatentConfig,
    Operands,
    SharedMemory,
)


def copy_all(config: LatentConfig, operands: Operands, scratch: SharedMemory, work_tiles: WorkTiles) -> None:
    """What the producer warpgroup does for a worker's work tiles: each of its warps starts its share of the copies."""
    share = functools.partial(_copy_share, config, operands, scratch, work_tiles)
    tiles.by_warps(config.copies.copies, share)


def _copy_share(
    config: LatentConfig, operands: Operands, scratch: SharedMemory, work_tiles: WorkTiles, own: list[Any], is_first
) -> None:
    """What a warp does: its own copies of each tile, and the first one copies queries."""
    begin, _, first_work_tile = work_tiles
    layer, row_block = operands.layer[0], lax.axis_index("rows")

    def copy_work_tile(number, now: WorkTile, following: WorkTile, state):
        @pl.when(is_first)
        def copy():
            copy_queries(operands, scratch, now.sequence, row_block, number > begin)

        return _copy_pairs(config, operands, scratch, layer, now, following, state, own)

    first_pages = _pages(config, operands, first_work_tile, first_work_tile.first, own)
    done, _ = walk(operands, work_tiles, copy_work_tile, (jnp.int32(0), first_pages))

    wait_for_last(scratch, work_tiles, done, is_first)


def copy_queries(operands: Operands, scratch: SharedMemory, sequence, row_block, has_used) -> None:
    """Starts the copies of a work tile's queries, where those of the one before are no longer needed."""
    rows, half = pl.ds(row_block * BLOCK_ROWS, BLOCK_ROWS), scratch.q.shape[-1]
    pl.when(has_used)(lambda: plgpu.barrier_wait(scratch.q_empty))
    plgpu.copy_gmem_to_smem(operands.q_pe.at[sequence, rows], scratch.q_pe, scratch.q_full)
    for number in range(CONSUMERS):
        q = operands.q_nope.at[sequence, rows, pl.ds(number * half, half)]
        plgpu.copy_gmem_to_smem(q, scratch.q.at[number], scratch.q_full)


def wait_for_last(scratch: SharedMemory, work_tiles: WorkTiles, done, is_first) -> None:
    """Waits until the consumers are done with all.

    Args:
        done: Pairs.
        is_first: Whether queries are this warp's.
    """

    @pl.when(is_first & (work_tiles.begin < work_tiles.end))
    def wait_for_the_last_queries():
        plgpu.barrier_wait(scratch.q_empty)

    @pl.when(done > 0)
    def wait_for_the_last_pair():
        for emptied in (scratch.own_empty, scratch.other_empty):
            for consumer in range(CONSUMERS):
                plgpu.barrier_wait(emptied.at[consumer])


def _pages(config: LatentConfig, operands: Operands, work_tile: WorkTile, pair, own: list[Any]):
    """The pages of a pair of tiles."""
    last = jnp.maximum(work_tile.end_key - 1, 0)
    sequence = work_tile.sequence
    if operands.sequence is not None:
        sequence = operands.sequence[sequence]
    return [
        config.copies.pages(operands.page_table, sequence, pair * CONSUMERS + number, last, own)
        for number in range(CONSUMERS)
    ]


def _copy_pairs(
    config: LatentConfig,
    operands: Operands,
    scratch: SharedMemory,
    layer,
    work_tile: WorkTile,
    following: WorkTile,
    state,
    own: list[Any],
):
    """A work tile's pairs in turn; page numbers come from memory too, so they are asked for a pair ahead."""
    done, pages = state
    end_key, half = work_tile.end_key, config.half

    def copy_pair(pair, pages):
        is_last = pair + 1 == work_tile.end
        source = jax.tree.map(lambda of_next, own: jnp.where(is_last, of_next, own), following, work_tile)
        next_pair = jnp.where(is_last, following.first, pair + 1)
        next_pages = _pages(config, operands, source, next_pair, own)

        def copy(tile_of, begin, width, smem, full):
            tile, columns = pair * CONSUMERS + tile_of, pl.ds(begin, width)
            start = functools.partial(
                config.copies.start,
                operands.pages,
                PoolPlace(layer, 0, 0),
                pages[tile_of],
                tile,
                smem.at[tile_of],
                full.at[tile_of],
                copies=own,
                columns=columns,
            )
            tile_end = (tile + 1) * config.copies.block_kv
            pl.when(tile_end <= end_key)(start)
            pl.when(tile_end > end_key)(functools.partial(start, end_key=end_key))

        def wait(emptied, tile_of):
            pl.when(done + pair > work_tile.first)(lambda: plgpu.barrier_wait(emptied.at[tile_of]))

        for tile_of in range(CONSUMERS):
            wait(scratch.own_empty, tile_of)
            copy(tile_of, tile_of * half, half, scratch.own, scratch.own_full)
            wait(scratch.other_empty, tile_of)
            copy(tile_of, (1 - tile_of) * half, half, scratch.other, scratch.other_full)
            copy(tile_of, 2 * half, config.rotated, scratch.pe, scratch.other_full)
        return next_pages

    def skip_work_tile(_, pages):
        return _pages(config, operands, following, following.first, own)

    pages = lax.fori_loop(work_tile.first, work_tile.end, copy_pair, pages)
    pages = lax.fori_loop(0, jnp.where(work_tile.first < work_tile.end, 0, 1), skip_work_tile, pages)
    return done + work_tile.end - work_tile.first, pages
