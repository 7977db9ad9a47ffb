"""The products of a stage: weights of a part of it are made wider while those of others are multiplied.

Warps multiply by themselves with a tile of 8 rows, and all four of a consumer together with more.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.warp_products import product
from jattn_kernels.mosaic.sm90.int4.tile_sizes import PART_DEPTH, ROWS_OF_LINES, Int4Tiles
from jattn_kernels.mosaic.sm90.int4.unpacked import load_zero_points, unpacked

_ROWS_UNDER_WAY = 128  # of products whose sums fit the registers beside the weights
_MOST_UNDER_WAY = 4  # of these products
_TILED_COLUMNS = 64  # of rows, at most, that lie together


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageProducts:
    """What a consumer multiplies of a stage.

    Attributes:
        group_size: Inputs that have a scale together.
    """

    sizes: Int4Tiles
    group_size: int

    @property
    def groups(self) -> int:
        """That a stage has scales of."""
        return max(1, self.sizes.block_depth // self.group_size)

    @property
    def part_depth(self) -> int:
        """Inputs that are multiplied before a scale is."""
        return min(PART_DEPTH, self.group_size)

    @property
    def tiled_columns(self) -> int:
        """Of rows, that lie together in shared memory."""
        return min(self.part_depth, _TILED_COLUMNS)

    @property
    def by_warps(self) -> bool:
        """Whether each warp multiplies by itself."""
        return self.sizes.block_rows == TILED_ROWS

    @property
    def batches(self) -> list[range]:
        """Where parts begin, those together that are under way at the same time."""
        begins = range(0, self.sizes.block_depth, self.part_depth)
        together = min(max(1, _ROWS_UNDER_WAY // self.sizes.block_rows), _MOST_UNDER_WAY)
        if self.sizes.block_depth > PART_DEPTH and self.sizes.block_rows > ROWS_OF_LINES:
            together = 1  # four consumers have registers for no more
        return [begins[i : i + together] for i in range(0, len(begins), together)]

    def added(self, total: Any, packed: Any, scratch: Any, stage: Any, first: Any, own: Any, number: Any) -> Any:
        """The sums with a stage's products, each part's times its group's scales.

        Args:
            packed: The stage's weights of a consumer, as `load_packed` has loaded them.
            scratch: Of the product.
            stage: Whose scales are meant, and of which half.
            first: The stage's first input, of a row that is all in shared memory; else the stage.
            own: The consumer's columns, of that half's.
            number: Of the consumer.
        """
        for begins in self.batches:
            total = self._added(total, begins, packed, scratch, stage, first, own, number)
        return total

    def _added(
        self, total: Any, begins: range, packed: Any, scratch: Any, stage: Any, first: Any, own: Any, number: Any
    ) -> Any:
        layout = plgpu.Layout.WGMMA.reduce(1)
        scales, *zero_points = scratch.of_groups
        scales = [scales.at[stage, begin // self.group_size, own] for begin in begins]
        factors = [plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32) for ref in scales]

        def weights(begin: int) -> Any:
            taken = [load_zero_points(each.at[stage, begin // self.group_size, own]) for each in zero_points]
            return unpacked(packed, begin, self.part_depth, scratch.x.dtype, *taken)

        if self.by_warps:
            results = [self._of_warps(begin, weights, scratch, first) for begin in begins]
        else:
            results = self._of_warpgroup(begins, weights, scratch, first, number)
        for result, factor in zip(results, factors, strict=True):
            total += result * lax.broadcast_in_dim(factor, result.shape, [0])
        return total

    def _of_warps(self, begin: int, weights: Callable[[int], Any], scratch: Any, first: Any) -> Any:
        return product(weights(begin), self._rows(begin, scratch, first), self.tiled_columns)

    def _of_warpgroup(
        self, begins: range, weights: Callable[[int], Any], scratch: Any, first: Any, number: Any
    ) -> list[Any]:
        def products(*accumulators):
            for begin, acc in zip(begins, accumulators, strict=True):
                x = self._rows(begin, scratch, first)
                plgpu.wgmma(acc, self._where_read(begin, weights(begin), scratch, number), x.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return [acc[...] for acc in accumulators]

        accumulator = tiles.accumulator(WGMMA_ROWS, self.sizes.block_rows)
        return pl.run_scoped(products, *[accumulator] * len(begins))

    def _rows(self, begin: int, scratch: Any, first: Any) -> Any:
        depth = self.part_depth
        if self.sizes.whole_row:
            return scratch.x.at[:, pl.ds(pl.multiple_of(first + begin, depth), depth)]
        return scratch.x.at[first, :, pl.ds(begin, depth)]

    def _where_read(self, begin: int, weights: Any, scratch: Any, number: Any) -> Any:
        """Weights where the tensor cores read them, which in the interpreter is no register."""
        if scratch.wide is None:
            return weights
        wide = scratch.wide.at[number, :, pl.ds(begin, self.part_depth)]
        wide[...] = weights
        plgpu.commit_smem()
        return wide
