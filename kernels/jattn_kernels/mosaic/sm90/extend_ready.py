"""The readying warpgroup of the extend kernel: it makes of tiles as they were copied tiles as they are multiplied.

Only kernels have it that need it. Values of 8 bits it widens into tiles of their own. Keys it turns by their positions
where they are, or widens first, into tiles of their own too. What it has widened the memory warpgroup may overwrite at
once; the others wait for what is ready, and free it, as they do with copied tiles where nothing is readied.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.extend_formats import ExtendFormats
from jattn_kernels.mosaic.sm90.extend_tile import Operands, Unit, clear_unowned
from jattn_kernels.mosaic.sm90.readied import widen
from jattn_kernels.mosaic.sm90.tiles import WGMMA_ROWS
from jattn_kernels.spec import AttentionSpec


class Tiles(NamedTuple):
    """Tiles of keys or of values that one warpgroup fills for others, each in the place of the one `stages` before it.

    Attributes:
        smem: The places.
        full, free: Barriers of each: the tile may be read; it may be overwritten.
    """

    smem: Any
    full: Any
    free: Any

    @property
    def stages(self) -> int:
        return self.smem.shape[0]

    def stage(self, step: Any) -> Any:
        """The place of a tile, which is numbered among all of a block."""
        return lax.rem(step, self.stages)


class TilePair(NamedTuple):
    """Tiles of keys, and of values."""

    keys: Tiles
    values: Tiles


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

        def ready_unit(round, carry):
            done, now = carry
            following = unit(round + 1)  # read long before it is needed
            begun = now.begun(done)

            @pl.loop(jnp.int32(now.begin_tile), now.end_tile)
            def ready_tile(tile):
                if self.formats.widens:
                    self._widen_values(now, tile, begun + tile)

            return begun + now.end_tile, following

        done, _ = lax.fori_loop(0, rounds, ready_unit, (jnp.int32(0), unit(0)))
        # Of tiles that are readied where they are the memory warpgroup waits for the last.
        for ready, copied in zip(self.ready, self.copied, strict=True):
            if ready.free is copied.free:
                continue

            @pl.loop(jnp.maximum(done, ready.stages), done + ready.stages)
            def wait_for_the_last(step, ready=ready):
                plgpu.barrier_wait(ready.free.at[ready.stage(step)])

    def _widen_values(self, unit: Unit, tile: Any, step: Any) -> None:
        """A tile of values; those that are not the request's own are cleared."""
        copied, ready = self.copied.values, self.ready.values
        source, target = copied.stage(step), ready.stage(step)
        plgpu.barrier_wait(copied.full.at[source])
        pl.when(step >= ready.stages)(lambda: plgpu.barrier_wait(ready.free.at[target]))
        self._widen(copied.smem.at[source], ready.smem.at[target])
        plgpu.barrier_arrive(copied.free.at[source])
        owned = unit.owns(tile, ready.smem.shape[1])
        pl.when(jnp.logical_not(owned))(lambda: clear_unowned(ready.smem.at[target], unit, tile))
        plgpu.barrier_arrive(ready.full.at[target])

    def _widen(self, source: Any, target: Any) -> None:
        block_kv, width = target.shape
        columns = 2 * WGMMA_ROWS if width % (2 * WGMMA_ROWS) == 0 else WGMMA_ROWS  # few registers
        for row in range(0, block_kv, WGMMA_ROWS):
            for column in range(0, width, columns):
                part = pl.ds(row, WGMMA_ROWS), pl.ds(column, columns)
                widen(source.at[part], target.at[part])
