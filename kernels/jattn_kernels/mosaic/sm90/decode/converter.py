"""The decode kernel's producer warpgroup where latents are packed: rows pass through its registers, a tile ahead.

What it stores is a tile of bfloat16 as TMA would bring one; the consumers do not know of it. One consumer warpgroup
keeps up with the memory, so registers are no matter: all of a tile's bytes are under way while the one before it is
stored, 41 KB of an SM.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import widened_rows
from jattn_kernels.mosaic.sm90.common.work_tiles import WorkTile, WorkTiles, walk
from jattn_kernels.mosaic.sm90.decode.config import DecodeConfig, Operands, SharedMemory
from jattn_kernels.mosaic.sm90.decode.producer import copy_latent_queries, wait_for_last
from jattn_kernels.packed_latents import SCALE_BYTES, TILE, rotated_begin


class _Loaded(NamedTuple):
    """A tile's rows in registers: numbers of fp8 and their scales, a tile of a row at a time, and the rotated ones."""

    numbers: list[jax.Array]
    scales: list[jax.Array]
    rotated: jax.Array


def convert_all(config: DecodeConfig, operands: Operands, scratch: SharedMemory, work_tiles: WorkTiles) -> None:
    """What the warpgroup does for a worker's work tiles."""
    spec, stages, layer = config.spec, config.sizes.stages, operands.layer[0]
    width, rotated_bytes = spec.value_dim, 2 * (spec.head_dim - spec.value_dim)
    (tiles_smem,), (filled,), (emptied,) = scratch.pages, scratch.full, scratch.empty
    first_row = lax.axis_index("rows") * config.sizes.block_rows
    row_tiles = range(width // TILE)

    def rows_of(work_tile: WorkTile, tile):
        last = jnp.maximum(work_tile.end_key - 1, 0)
        facts = {"page_size": config.page_size, "num_pages": operands.k_pages.shape[1]}
        return widened_rows.find_rows(operands.page_table, work_tile.sequence, tile, last, **facts)

    def load_numbers(rows, number: int):
        numbers = widened_rows.load(operands.k_pages, layer, rows, number * TILE, TILE)
        return numbers, widened_rows.load_scales(operands.k_pages, layer, rows, width + number * SCALE_BYTES)

    def load_rotated(rows):
        return widened_rows.load(operands.k_pages, layer, rows, rotated_begin(width), rotated_bytes)

    def load(work_tile: WorkTile, tile) -> _Loaded:
        rows = rows_of(work_tile, tile)
        numbers, scales = zip(*(load_numbers(rows, number) for number in row_tiles), strict=True)
        return _Loaded([*numbers], [*scales], load_rotated(rows))

    def convert_work_tile(number, now: WorkTile, following: WorkTile, state):
        done, loaded = state
        slot = lax.rem(number - work_tiles.begin, 2)
        pl.when(number - work_tiles.begin >= 2)(lambda: plgpu.barrier_wait(scratch.q_empty.at[slot]))
        copy_latent_queries(config, operands, scratch, now.sequence, first_row, slot)

        def convert_tile(tile, loaded: _Loaded) -> _Loaded:
            is_last = tile + 1 == now.end
            source = jax.tree.map(lambda of_next, own: jnp.where(is_last, of_next, own), following, now)
            rows = rows_of(source, jnp.where(is_last, following.first, tile + 1))
            step = done + tile - now.first
            stage = lax.rem(step, stages)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(emptied.at[stage]))
            target: Any = tiles_smem.at[stage]
            numbers, scales = [], []
            for number in row_tiles:
                widened_rows.store(loaded.numbers[number], target, number * TILE, TILE, loaded.scales[number])
                for parts, part in zip((numbers, scales), load_numbers(rows, number), strict=True):
                    parts.append(part)
            widened_rows.store_as_they_are(loaded.rotated, target, width)
            widened_rows.stored()
            plgpu.barrier_arrive(filled.at[stage])
            return _Loaded(numbers, scales, load_rotated(rows))

        loaded = lax.fori_loop(now.first, now.end, convert_tile, loaded)
        skips = jnp.where(now.first < now.end, 0, 1)
        loaded = lax.fori_loop(0, skips, lambda _, loaded: load(following, following.first), loaded)
        return done + now.end - now.first, loaded

    first = work_tiles.first
    done, _ = walk(operands, work_tiles, convert_work_tile, (jnp.int32(0), load(first, first.first)))
    wait_for_last(config, scratch, work_tiles, done, is_first=True)
