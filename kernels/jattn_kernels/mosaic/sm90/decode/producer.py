"""The producer warpgroup of the decode kernel: TMA copies of queries, keys and values, `stages` tiles ahead."""

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
from jattn_kernels.mosaic.sm90.decode.config import DecodeConfig, Operands, SharedMemory


def steps_of(work_tile: WorkTile, config: DecodeConfig):
    """How many tiles of a work tile each consumer warpgroup takes, or the first one if they do not come out even."""
    return lax.div(work_tile.end - work_tile.first + config.sizes.warpgroups - 1, config.sizes.warpgroups)


def copy_all(config: DecodeConfig, operands: Operands, scratch: SharedMemory, work_tiles: WorkTiles) -> None:
    """What the producer warpgroup does for a worker's work tiles: each of its warps starts its share of the copies."""
    tiles.by_warps(config.copies.copies, functools.partial(_copy_share, config, operands, scratch, work_tiles))


def _copy_share(
    config: DecodeConfig, operands: Operands, scratch: SharedMemory, work_tiles: WorkTiles, own: list[Any], is_first
) -> None:
    """What a warp does: its own copies of each tile, and the first one copies queries."""
    begin, _, first_work_tile = work_tiles
    layer = operands.layer[0]  # before what depends on a load: so it has arrived by then too
    block_rows = config.sizes.block_rows
    block = lax.div(lax.axis_index("head"), config.heads_per_block) * config.row_blocks + lax.axis_index("rows")
    rows = block if config.rotates else pl.ds(block * block_rows, block_rows)

    def copy_work_tile(number, now, following, state):
        def copy_queries():
            slot = lax.rem(number - begin, 2)
            pl.when(number - begin >= 2)(lambda: plgpu.barrier_wait(scratch.q_empty.at[slot]))
            if operands.q_pe is not None:
                copy_latent_queries(config, operands, scratch, now.sequence, block * block_rows, slot)
                return
            if config.whole_queries:
                q = operands.q.at[now.sequence, 0, rows]
                plgpu.copy_gmem_to_smem(q, scratch.q.at[slot], scratch.q_full.at[slot])
                return
            if config.q_copies > 1:
                for part in range(config.q_parts):
                    q = operands.q.at[now.sequence, part, rows]
                    own_place = pl.ds(part * block_rows, block_rows) if config.stacks else part
                    plgpu.copy_gmem_to_smem(q, scratch.q.at[slot, own_place], scratch.q_full.at[slot])
                return
            q = operands.q.at[now.sequence, rows] if config.rotates else operands.q.at[now.sequence, :, rows]
            plgpu.copy_gmem_to_smem(q, scratch.q.at[slot], scratch.q_full.at[slot])

        if not config.projected:
            pl.when(is_first)(copy_queries)
        return _copy_tiles(config, operands, scratch, layer, now, following, state, own)

    first_pages = _pages(config, operands, first_work_tile, first_work_tile.first, own)
    done, _ = walk(operands, work_tiles, copy_work_tile, (jnp.int32(0), first_pages))

    wait_for_last(config, scratch, work_tiles, done, is_first)


def wait_for_last(config: DecodeConfig, scratch: SharedMemory, work_tiles: WorkTiles, done, is_first) -> None:
    """Waits until the consumers are done with all.

    Args:
        done: Tiles.
        is_first: Whether queries are this warp's.
    """
    begin, end, _ = work_tiles
    stages = config.sizes.stages

    def wait_for_the_last_queries():
        @pl.loop(jnp.maximum(begin, end - 2), end)
        def wait(number):
            plgpu.barrier_wait(scratch.q_empty.at[lax.rem(number - begin, 2)])

    if not config.projected:
        pl.when(is_first)(wait_for_the_last_queries)

    @pl.loop(jnp.maximum(done, stages), done + stages)
    def wait_for_the_last_tiles(step):
        for emptied in scratch.empty:
            plgpu.barrier_wait(emptied.at[lax.rem(step, stages)])


def copy_latent_queries(
    config: DecodeConfig, operands: Operands, scratch: SharedMemory, sequence, first_row, slot
) -> None:
    """Both parts of the rows, side by side: what is copied at a time lies together in tiled memory."""
    width = config.spec.value_dim
    for begin in range(0, config.sizes.block_rows, tiles.TILED_ROWS):
        rows = pl.ds(first_row + begin, tiles.TILED_ROWS)
        target = scratch.q.at[slot, 0, pl.ds(begin, tiles.TILED_ROWS)]
        for q, columns in (
            (operands.q.at[sequence, 0, rows], pl.ds(0, width)),
            (operands.q_pe.at[sequence, rows], pl.ds(width, config.spec.head_dim - width)),
        ):
            plgpu.copy_gmem_to_smem(q, target.at[:, columns], scratch.q_full.at[slot])


def _pages(config: DecodeConfig, operands: Operands, work_tile: WorkTile, tile, own: list[Any]):
    return config.copies.pages(
        operands.page_table, work_tile.sequence, tile, jnp.maximum(work_tile.end_key - 1, 0), own
    )


def _copy_tiles(
    config: DecodeConfig,
    operands: Operands,
    scratch: SharedMemory,
    layer,
    work_tile: WorkTile,
    following: WorkTile,
    state,
    own: list[Any],
):
    """A work tile's tiles of k and v in turn; page numbers come from memory too, so they are asked for a tile ahead."""
    stages, block_kv, warpgroups = config.sizes.stages, config.sizes.block_kv, config.sizes.warpgroups
    head = lax.axis_index("head")
    begun, pages = state

    def each_of_stage(step):
        stage = lax.rem(step, stages)
        pools = (operands.k_pages, operands.v_pages)[: len(scratch.pages)]
        parts = zip(pools, scratch.pages, scratch.full, scratch.empty, strict=True)
        for of_values, (pages_ref, smem, filled, emptied) in enumerate(parts):
            pl.when(step >= stages)(lambda emptied=emptied: plgpu.barrier_wait(emptied.at[stage]))
            yield PoolPlace(layer, head, of_values), pages_ref, smem.at[stage], filled.at[stage]

    def copy_tile(tile, pages):
        is_last = tile + 1 == work_tile.end
        source = jax.tree.map(lambda of_next, own: jnp.where(is_last, of_next, own), following, work_tile)
        next_pages = _pages(config, operands, source, jnp.where(is_last, following.first, tile + 1), own)
        tile_end = (tile + 1) * block_kv
        for where, pages_ref, smem, filled in each_of_stage(begun + tile - work_tile.first):
            start = functools.partial(config.copies.start, pages_ref, where, pages, tile, smem, filled, copies=own)
            pl.when(tile_end <= work_tile.end_key)(start)
            pl.when(tile_end > work_tile.end_key)(functools.partial(start, end_key=work_tile.end_key))
        return next_pages

    def skip_work_tile(_, pages):
        return _pages(config, operands, following, following.first, own)

    pages = lax.fori_loop(work_tile.first, work_tile.end, copy_tile, pages)
    pages = lax.fori_loop(0, jnp.where(work_tile.first < work_tile.end, 0, 1), skip_work_tile, pages)
    done = begun + work_tile.end - work_tile.first
    if warpgroups == 1:
        return done, pages
    # Every warpgroup takes the same number of tiles of a work tile, some of them empty.
    rounded = begun + steps_of(work_tile, config) * warpgroups

    @pl.loop(done, rounded)
    def fill_up(step):
        for _, _, _, filled in each_of_stage(step):
            for _ in own:
                plgpu.barrier_arrive(filled)

    return rounded, pages
