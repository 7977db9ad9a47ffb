"""The readying warpgroup of the extend kernel: it makes of tiles as they were copied tiles as they are multiplied.

Only kernels have it that need it. Numbers of 8 bits it widens into tiles of their own: all values, and keys that are to
be turned. Those the memory warpgroup may overwrite at once. Other tiles are readied where they are. Keys are turned by
their positions, and values that are not a request's own are cleared. The compute warpgroups wait for what is ready, and
free it, as they do with copied tiles where nothing is readied.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.extend_formats import ExtendFormats
from jattn_kernels.mosaic.sm90.extend_tile import Operands, TilePair, Tiles, Unit, clear_unowned
from jattn_kernels.mosaic.sm90.readied import Turn, turn_pairs, turned_on, widen
from jattn_kernels.mosaic.sm90.tiles import WGMMA_ROWS
from jattn_kernels.spec import AttentionSpec

TURNED_KEYS = WGMMA_ROWS  # at a time


@dataclasses.dataclass(frozen=True)
class ExtendReady:
    """What the readying warpgroup of a block has to do with.

    Attributes:
        copied: What the memory warpgroup fills.
        ready: What the compute warpgroups read: keys and values that are not readied are the copied ones.
    """

    spec: AttentionSpec
    formats: ExtendFormats
    operands: Operands
    copied: TilePair
    ready: TilePair

    def run(self, unit: Callable[[Any], Unit], rounds: Any) -> None:
        """What the warpgroup does for all units of its block.

        Args:
            unit: Gives the unit of a round.
        """
        key_turns = self._key_turns()

        def ready_unit(round, carry):
            done, now = carry
            following = unit(round + 1)  # read long before it is needed
            begun = now.begun(done)

            @pl.loop(jnp.int32(now.begin_tile), now.end_tile)
            def ready_tile(tile):
                if self.formats.turns:
                    first = self._tile_turn(tile, 0, 0)  # comes from memory: asked for before the keys are waited for
                    turn = functools.partial(self._turn, tile=tile, first=first, key_turns=key_turns)
                    self._ready(self.copied.keys, self.ready.keys, begun + tile, turn)
                clear = functools.partial(self._clear, unit=now, tile=tile)
                self._ready(self.copied.values, self.ready.values, begun + tile, clear)

            return begun + now.end_tile, following

        done, _ = lax.fori_loop(0, rounds, ready_unit, (jnp.int32(0), unit(0)))
        if self.formats.widens:
            # For the last of other tiles the memory warpgroup waits.
            for ready in self.ready if self.formats.turns else [self.ready.values]:

                @pl.loop(jnp.maximum(done, ready.stages), done + ready.stages)
                def wait_for_the_last(step, ready=ready):
                    plgpu.barrier_wait(ready.free.at[ready.stage(step)])

    def _ready(self, copied: Tiles, ready: Tiles, step: Any, finish: Callable[[Any], None]) -> None:
        """The next tile.

        Args:
            finish: Makes what there is to be made of it when it is in its place.
        """
        source, target = copied.stage(step), ready.stage(step)
        plgpu.barrier_wait(copied.full.at[source])
        if self.formats.widens:
            pl.when(step >= ready.stages)(lambda: plgpu.barrier_wait(ready.free.at[target]))
            _widen(copied.smem.at[source], ready.smem.at[target])
            plgpu.barrier_arrive(copied.free.at[source])
        finish(ready.smem.at[target])
        plgpu.barrier_arrive(ready.full.at[target])

    def _clear(self, values: Any, *, unit: Unit, tile: Any) -> None:
        owned = unit.owns(tile, values.shape[0])
        pl.when(jnp.logical_not(owned))(lambda: clear_unowned(values, unit, tile))

    def _turn(self, keys: Any, *, tile: Any, first: Turn, key_turns: dict[int, Turn]) -> None:
        """Keys of a tile turned by their numbers.

        Args:
            first: The angles of the first piece's first key.
            key_turns: Of the pairs from each column on, the angles between a piece's keys and its first.
        """
        pieces, tile_turns = self._pieces, [first]
        for number, (row, column) in enumerate(pieces):
            tile_turns += [self._tile_turn(tile, *piece) for piece in pieces[number + 1 : number + 2]]
            halves = [
                keys.at[pl.ds(row, TURNED_KEYS), pl.ds(begin + column, self._width)] for begin in (0, self._pairs)
            ]
            turn_pairs(halves, halves, turned_on(key_turns[column], tile_turns[number]))

    @property
    def _pieces(self) -> list[tuple[int, int]]:
        """First row and first pair of what is turned at a time: registers are few."""
        rows, columns = range(0, self.ready.keys.smem.shape[1], TURNED_KEYS), range(0, self._pairs, self._width)
        return list(itertools.product(rows, columns))

    @property
    def _pairs(self) -> int:
        return self.spec.head_dim // 2

    @property
    def _width(self) -> int:
        """Pairs that are turned at a time: whole columns of what lies together in tiled memory."""
        return 32 if self._pairs % 64 else 64

    def _tile_turn(self, tile: Any, row: int, column: int) -> Turn:
        """The angles of the first key of a piece."""
        key = tile * self.ready.keys.smem.shape[1] + row
        place = lax.div(key, TURNED_KEYS), pl.ds(column, self._width)
        return _load(self.operands.tile_turns, place, plgpu.Layout.WGMMA.reduce(0))

    def _key_turns(self) -> dict[int, Turn]:
        if not self.formats.turns:
            return {}
        return {
            column: _load(self.operands.key_turns, (slice(None), pl.ds(column, self._width)), plgpu.Layout.WGMMA)
            for column in range(0, self._pairs, self._width)
        }


def _load(turns: Turn, place: tuple[Any, ...], layout: Any) -> Turn:
    return Turn(*(plgpu.load(part.at[place], layout=layout, optimized=False) for part in turns))


def _widen(source: Any, target: Any) -> None:
    """fp8 into float16, some rows and columns at a time: registers are few."""
    block_kv, width = target.shape
    columns = 64 if width % 128 else 128
    for row in range(0, block_kv, WGMMA_ROWS):
        for column in range(0, width, columns):
            part = pl.ds(row, WGMMA_ROWS), pl.ds(column, columns)
            widen(source.at[part], target.at[part])
