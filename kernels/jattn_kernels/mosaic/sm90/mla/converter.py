"""The latent kernel's producer warpgroup where rows are of fp8: they pass through its registers, two pieces ahead.

Of packed rows a piece has one tile's numbers, which are multiplied with its scale on their way, or the rotated ones.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import widened_rows
from jattn_kernels.mosaic.sm90.common.work_tiles import WorkTile, WorkTiles, walk
from jattn_kernels.mosaic.sm90.mla.config import CONSUMERS, LatentConfig, Operands, SharedMemory
from jattn_kernels.mosaic.sm90.mla.producer import copy_queries, wait_for_last
from jattn_kernels.packed_latents import SCALE_BYTES, TILE, rotated_begin

_AHEAD = 2  # pieces in registers
_PIECE = 2 * widened_rows.PIECE_COLUMNS  # columns: four registers of a thread's four loads each


class _Piece(NamedTuple):
    """Some columns of one of a pair's tiles.

    Attributes:
        column, width: In a row; of packed ones in bytes.
        target, place: In shared memory, and there.
        emptied, filled: Barriers: what is waited for before, and who is told after; None if another piece's is enough.
        scale: The byte of a packed row where its scale is, or None: there is none, or numbers are stored as they are.
    """

    tile_of: int
    column: int
    width: int
    target: Any
    place: int
    emptied: Any
    filled: Any
    scale: int | None = None


def convert_all(config: LatentConfig, operands: Operands, scratch: SharedMemory, work_tiles: WorkTiles) -> None:
    """What the warpgroup does for a worker's work tiles."""
    pieces = _pieces(config, scratch)
    layer, row_block = operands.layer[0], lax.axis_index("rows")

    def load(rows, piece: _Piece):
        rows = rows[piece.tile_of]
        numbers = widened_rows.load(operands.pages, layer, rows, piece.column, piece.width)
        if piece.scale is None:
            return numbers, None
        return numbers, widened_rows.load_scales(operands.pages, layer, rows, piece.scale)

    def store(loaded, piece: _Piece):
        numbers, scales = loaded
        target = piece.target.at[piece.tile_of]
        if config.packed and scales is None:
            widened_rows.store_as_they_are(numbers, target)
        else:
            widened_rows.store(numbers, target, piece.place, piece.width, scales)

    def begin_pair(work_tile: WorkTile, pair):
        rows = _rows(config, operands, work_tile, pair)
        return rows, [load(rows, piece) for piece in pieces[:_AHEAD]]

    def convert_work_tile(number, now: WorkTile, following: WorkTile, state):
        done, begun = state
        copy_queries(operands, scratch, now.sequence, row_block, number > work_tiles.begin)

        def convert_pair(pair, begun):
            rows, ahead = begun
            is_last = pair + 1 == now.end
            source = jax.tree.map(lambda of_next, own: jnp.where(is_last, of_next, own), following, now)
            next_rows = _rows(config, operands, source, jnp.where(is_last, following.first, pair + 1))
            has_used = done + pair > now.first
            for number, piece in enumerate(pieces):
                if piece.emptied is not None:
                    pl.when(has_used)(functools.partial(plgpu.barrier_wait, piece.emptied))
                loaded, *ahead = ahead
                store(loaded, piece)
                if piece.filled is not None:
                    widened_rows.stored()
                    plgpu.barrier_arrive(piece.filled)
                next_piece = number + _AHEAD
                of_pair = rows if next_piece < len(pieces) else next_rows
                ahead = [*ahead, load(of_pair, pieces[next_piece % len(pieces)])]
            return next_rows, ahead

        begun = lax.fori_loop(now.first, now.end, convert_pair, begun)
        skips = jnp.where(now.first < now.end, 0, 1)
        begun = lax.fori_loop(0, skips, lambda _, begun: begin_pair(following, following.first), begun)
        return done + now.end - now.first, begun

    first = work_tiles.first
    done, _ = walk(operands, work_tiles, convert_work_tile, (jnp.int32(0), begin_pair(first, first.first)))
    wait_for_last(scratch, work_tiles, done, is_first=True)


def _pieces(config: LatentConfig, scratch: SharedMemory) -> list[_Piece]:
    """Of a pair, in the order in which they are wanted."""
    half, pieces = config.half, []
    rotated = (CONSUMERS * half, config.rotated)
    if config.packed:
        rotated = (rotated_begin(CONSUMERS * half), config.rotated * 2)
    for tile_of in range(CONSUMERS):
        own, other = scratch.own_full.at[tile_of], scratch.other_full.at[tile_of]
        for target, begin, width, emptied, filled in (
            (scratch.own, tile_of * half, half, scratch.own_empty.at[tile_of], own),
            (scratch.other, (1 - tile_of) * half, half, scratch.other_empty.at[tile_of], None),
            (scratch.pe, *rotated, None, other),
        ):
            for place in range(0, width, _PIECE):
                is_first, is_last = place == 0, place + _PIECE >= width
                scale = CONSUMERS * half + (begin + place) // TILE * SCALE_BYTES
                piece = _Piece(
                    tile_of,
                    begin + place,
                    min(_PIECE, width - place),
                    target,
                    place,
                    emptied if is_first else None,
                    filled if is_last else None,
                    scale if config.packed and target is not scratch.pe else None,
                )
                pieces.append(piece)
    return pieces


def _rows(config: LatentConfig, operands: Operands, work_tile: WorkTile, pair) -> list[jax.Array]:
    """Where the rows of a pair's tiles lie."""
    last = jnp.maximum(work_tile.end_key - 1, 0)
    sequence = work_tile.sequence
    if operands.sequence is not None:
        sequence = operands.sequence[sequence]
    facts = {"page_size": config.page_size, "num_pages": operands.pages.shape[1]}
    return [
        widened_rows.find_rows(operands.page_table, sequence, pair * CONSUMERS + tile_of, last, **facts)
        for tile_of in range(CONSUMERS)
    ]
