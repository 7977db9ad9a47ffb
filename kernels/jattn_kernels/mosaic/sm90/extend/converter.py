"""The readying warpgroup of the extend kernel: it makes of tiles as they were copied tiles as they are multiplied.

Only kernels have it that need it. Numbers of 8 bits it widens into tiles of their own: all values, and keys that are to
be turned. Those the memory warpgroup may overwrite at once. Other tiles are readied where they are. Keys are turned by
their positions, and values that are not a request's own are cleared. The compute warpgroups wait for what is ready, and
free it, as they do with copied tiles where nothing is readied.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common.convert import widen_tile
from jattn_kernels.mosaic.sm90.common.key_rotation import KeyTurns
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendFormats
from jattn_kernels.mosaic.sm90.extend.work_tile import Operands, TilePair, Tiles, Unit, clear_unowned


@dataclasses.dataclass(frozen=True)
class ExtendReady:
    """What the readying warpgroup of a block has to do with.

    Attributes:
        copied: What the memory warpgroup fills.
        ready: What the compute warpgroups read: keys and values that are not readied are the copied ones.
    """

    formats: ExtendFormats
    operands: Operands
    copied: TilePair
    ready: TilePair

    def run(self, unit: Callable[[Any], Unit], rounds: Any) -> None:
        """What the warpgroup does for all units of its block.

        Args:
            unit: Gives the unit of a round.
        """
        turns = None
        if self.formats.turns:
            turns = KeyTurns.load(self.operands.turns, self.ready.keys.smem.shape[1])

        def ready_unit(round, carry):
            done, now = carry
            following = unit(round + 1)  # read long before it is needed
            begun = now.begun(done)

            @pl.loop(jnp.int32(now.begin_tile), now.end_tile)
            def ready_tile(tile):
                if turns is not None:
                    turn = functools.partial(turns.turn, tile=tile, first=turns.first(tile))
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
            widen_tile(copied.smem.at[source], ready.smem.at[target])
            plgpu.barrier_arrive(copied.free.at[source])
        finish(ready.smem.at[target])
        plgpu.barrier_arrive(ready.full.at[target])

    def _clear(self, values: Any, *, unit: Unit, tile: Any) -> None:
        owned = unit.owns(tile, values.shape[0])
        pl.when(jnp.logical_not(owned))(lambda: clear_unowned(values, unit, tile))
