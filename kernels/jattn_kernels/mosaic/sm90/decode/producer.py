"""The memory warpgroup of the decode kernel: it copies queries and tiles, item after item, `stages` tiles ahead."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import PoolPlace
from jattn_kernels.mosaic.sm90.decode.config import DecodeConfig, Item, Items, Operands, Scratch


def read_items(operands: Operands) -> Items:
    """What the block's worker has to do."""
    begin, end, *first = (operands.workers[lax.axis_index("worker"), field] for field in range(7))
    return Items(begin, end, Item(*first))


def _read_item(operands: Operands, number) -> Item:
    """An item of the schedule; the last one in place of one behind it."""
    number = jnp.minimum(number, operands.items.shape[0] - 1)
    return Item(*(operands.items[number, field] for field in range(5)))


def turns_of(item: Item, config: DecodeConfig):
    """How many tiles of an item each compute warpgroup takes, or the first one if they do not come out even."""
    return lax.div(item.end - item.first + config.sizes.warpgroups - 1, config.sizes.warpgroups)


def walk(operands: Operands, items: Items, visit, state):
    """Calls `visit(number, item, next item, state) -> state` for each of some items, which is read an item ahead."""

    def step(number, carry):
        now, state = carry
        following = _read_item(operands, number + 1)
        return following, visit(number, now, following, state)

    return lax.fori_loop(items.begin, items.end, step, (items.first, state))[1]


def copy_all(config: DecodeConfig, operands: Operands, scratch: Scratch, items: Items) -> None:
    """What the memory warpgroup does for a worker's items: each of its warps starts its share of the copies."""
    tiles.by_warps(config.copies.copies, functools.partial(_copy_share, config, operands, scratch, items))


def _copy_share(
    config: DecodeConfig, operands: Operands, scratch: Scratch, items: Items, own: list[Any], is_first
) -> None:
    """What a warp does: its own copies of each tile, and the first one copies queries."""
    begin, end, first_item = items
    layer = operands.layer[0]  # before what depends on a load: so it has arrived by then too
    block_rows, stages = config.sizes.block_rows, config.sizes.stages
    block = lax.div(lax.axis_index("head"), config.heads_a_block) * config.row_blocks + lax.axis_index("rows")
    rows = block if config.turns else pl.ds(block * block_rows, block_rows)

    def copy_item(number, now, following, state):
        @pl.when(is_first)
        def copy_queries():
            slot = lax.rem(number - begin, 2)
            pl.when(number - begin >= 2)(lambda: plgpu.barrier_wait(scratch.q_free.at[slot]))
            if config.q_copies > 1:
                for part in range(config.q_parts):
                    q = operands.q.at[now.sequence, part, rows]
                    plgpu.copy_gmem_to_smem(q, scratch.q.at[slot, part], scratch.q_full.at[slot])
                return
            q = operands.q.at[now.sequence, rows] if config.turns else operands.q.at[now.sequence, :, rows]
            plgpu.copy_gmem_to_smem(q, scratch.q.at[slot], scratch.q_full.at[slot])

        return _copy_tiles(config, operands, scratch, layer, now, following, state, own)

    first_pages = _pages(config, operands, first_item, first_item.first, own)
    done, _ = walk(operands, items, copy_item, (jnp.int32(0), first_pages))

    @pl.when(is_first)
    def wait_for_the_last_queries():
        @pl.loop(jnp.maximum(begin, end - 2), end)
        def wait(number):
            plgpu.barrier_wait(scratch.q_free.at[lax.rem(number - begin, 2)])

    @pl.loop(jnp.maximum(done, stages), done + stages)
    def wait_for_the_last_tiles(step):
        for freed in scratch.free:
            plgpu.barrier_wait(freed.at[lax.rem(step, stages)])


def _pages(config: DecodeConfig, operands: Operands, item: Item, tile, own: list[Any]):
    return config.copies.pages(operands.page_table, item.sequence, tile, jnp.maximum(item.end_key - 1, 0), own)


def _copy_tiles(
    config: DecodeConfig,
    operands: Operands,
    scratch: Scratch,
    layer,
    item: Item,
    following: Item,
    state,
    own: list[Any],
):
    """An item's tiles of k and v in turn; page numbers come from memory too, so they are asked for a tile ahead."""
    stages, block_kv, warpgroups = config.sizes.stages, config.sizes.block_kv, config.sizes.warpgroups
    head = lax.axis_index("head")
    begun, pages = state

    def each_of_stage(step):
        stage = lax.rem(step, stages)
        parts = zip((operands.k_pages, operands.v_pages), scratch.pages, scratch.full, scratch.free, strict=True)
        for of_values, (pages_ref, smem, filled, freed) in enumerate(parts):
            pl.when(step >= stages)(lambda freed=freed: plgpu.barrier_wait(freed.at[stage]))
            yield PoolPlace(layer, head, of_values), pages_ref, smem.at[stage], filled.at[stage]

    def copy_tile(tile, pages):
        is_last = tile + 1 == item.end
        source = jax.tree.map(lambda of_next, own: jnp.where(is_last, of_next, own), following, item)
        next_pages = _pages(config, operands, source, jnp.where(is_last, following.first, tile + 1), own)
        tile_end = (tile + 1) * block_kv
        for where, pages_ref, smem, filled in each_of_stage(begun + tile - item.first):
            start = functools.partial(config.copies.start, pages_ref, where, pages, tile, smem, filled, copies=own)
            pl.when(tile_end <= item.end_key)(start)
            pl.when(tile_end > item.end_key)(functools.partial(start, end_key=item.end_key))
        return next_pages

    def skip_item(_, pages):
        return _pages(config, operands, following, following.first, own)

    pages = lax.fori_loop(item.first, item.end, copy_tile, pages)
    pages = lax.fori_loop(0, jnp.where(item.first < item.end, 0, 1), skip_item, pages)
    done = begun + item.end - item.first
    if warpgroups == 1:
        return done, pages
    # Every warpgroup takes the same number of tiles of an item, some of them empty.
    rounded = begun + turns_of(item, config) * warpgroups

    @pl.loop(done, rounded)
    def fill_up(step):
        for _, _, _, filled in each_of_stage(step):
            for _ in own:
                plgpu.barrier_arrive(filled)

    return rounded, pages
