"""The converter warpgroup of the extend kernel, between producer and consumers: dequantisation and rotation of tiles.

Only kernels that need it have it. It dequantises 8-bit values into tiles of their own: all values, and keys that are to
be rotated; those tiles the producer may overwrite at once. Other tiles are converted where they are. Keys are rotated
by their positions, and values that are not a request's own are cleared. The consumers wait for converted tiles, and
release them, as they do with copied ones where nothing is converted.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common.convert import dequantise_tile
from jattn_kernels.mosaic.sm90.common.key_rotation import KeyRotation
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.mosaic.sm90.extend.work_tile import Operands, TilePair, Tiles, WorkTile, clear_unowned


@dataclasses.dataclass(frozen=True)
class Converter:
    """What the converter warpgroup of a block has to do with.

    Attributes:
        copied: What the producer warpgroup fills.
        converted: What the consumer warpgroups read: keys and values that are not converted are the copied ones.
    """

    dtypes: ExtendDtypes
    operands: Operands
    copied: TilePair
    converted: TilePair

    def run(self, work_tile: Callable[[Any], WorkTile], rounds: Any) -> None:
        """What the warpgroup does for all work tiles of its block.

        Args:
            work_tile: Gives the work tile of a round.
        """
        rotation = None
        if self.dtypes.rotates:
            rotation = KeyRotation.load(self.operands.rotations, self.converted.keys.smem.shape[1])

        def convert_work_tile(round, carry):
            done, now = carry
            following = work_tile(round + 1)  # read long before it is needed
            begun = now.begun(done)

            @pl.loop(jnp.int32(now.begin_tile), now.end_tile)
            def convert_tile(tile):
                if rotation is not None:
                    rotate = functools.partial(rotation.rotate, tile=tile, first=rotation.first(tile))
                    self._convert(self.copied.keys, self.converted.keys, begun + tile, rotate)
                clear = functools.partial(self._clear, work_tile=now, tile=tile)
                self._convert(self.copied.values, self.converted.values, begun + tile, clear)

            return begun + now.end_tile, following

        done, _ = lax.fori_loop(0, rounds, convert_work_tile, (jnp.int32(0), work_tile(0)))
        if self.dtypes.dequantises:
            # For the last of other tiles the producer warpgroup waits.
            for converted in self.converted if self.dtypes.rotates else [self.converted.values]:

                @pl.loop(jnp.maximum(done, converted.stages), done + converted.stages)
                def wait_for_the_last(step, converted=converted):
                    plgpu.barrier_wait(converted.empty.at[converted.stage(step)])

    def _convert(self, copied: Tiles, converted: Tiles, step: Any, finish: Callable[[Any], None]) -> None:
        """The next tile.

        Args:
            finish: Makes what there is to be made of it when it is in its place.
        """
        source, target = copied.stage(step), converted.stage(step)
        plgpu.barrier_wait(copied.full.at[source])
        if self.dtypes.dequantises:
            pl.when(step >= converted.stages)(lambda: plgpu.barrier_wait(converted.empty.at[target]))
            dequantise_tile(copied.smem.at[source], converted.smem.at[target])
            plgpu.barrier_arrive(copied.empty.at[source])
        finish(converted.smem.at[target])
        plgpu.barrier_arrive(converted.full.at[target])

    def _clear(self, values: Any, *, work_tile: WorkTile, tile: Any) -> None:
        owned = work_tile.owns(tile, values.shape[0])
        pl.when(jnp.logical_not(owned))(lambda: clear_unowned(values, work_tile, tile))
