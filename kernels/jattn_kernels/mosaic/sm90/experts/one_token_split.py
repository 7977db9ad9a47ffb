"""Products of one token's row, in units of 64 columns and a share of the depth, as `skinny_matmul` has them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.indexed import gather
from jattn_kernels.mosaic.sm90.common.product_tiles import summed_over_stages
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH, Scratch


class Bias(NamedTuple):
    """Of a product.

    Attributes:
        ref: (L * columns,), in global memory.
        layer: Which of them.
        columns: Of the bias: there may be fewer than the product has.
    """

    ref: Any
    layer: Any
    columns: int

    def of_block(self, split: Any, block: Any) -> jax.Array:
        """What the first split of a block of columns adds to all rows; 0 of others."""
        layout = plgpu.Layout.WGMMA.reduce(1)
        column = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=layout) + block * WGMMA_ROWS
        place = jnp.where(column < self.columns, column + self.layer * self.columns, -1)
        numbers = gather(self.ref, place, layout).astype(jnp.float32) * jnp.where(split == 0, 1.0, 0.0)
        return lax.broadcast_in_dim(numbers, (WGMMA_ROWS, TILED_ROWS), [0])


@dataclasses.dataclass(frozen=True)
class SplitProduct:
    """A block takes every n-th unit.

    Attributes:
        depth, columns: Of the weights.
        splits: Shares of the depth.
    """

    depth: int
    columns: int
    splits: int

    @classmethod
    def of_a_unit_each(cls, depth: int, columns: int, most_splits: int) -> "SplitProduct":
        """One that gives no block more than a unit: of few enough columns that there is a block for each 64 of them."""
        return cls(depth, columns, min(pl.cdiv(depth, DEPTH), most_splits, tiles.num_sms() // (columns // WGMMA_ROWS)))

    @property
    def column_blocks(self) -> int:
        return self.columns // WGMMA_ROWS

    @property
    def steps(self) -> int:
        """Of the whole depth."""
        return pl.cdiv(self.depth, DEPTH)

    @property
    def units(self) -> int:
        return self.column_blocks * self.splits

    @property
    def most_steps(self) -> int:
        """Of a share."""
        return pl.cdiv(self.steps, self.splits)

    def for_each(self, own: Any, visit: Callable[[Any, Any, Any, Any, Any], Any], done: Any) -> Any:
        """`visit(split, block of columns, first step, steps, done)` for each unit of the block with this number."""

        def step(i, done):
            number = own + i * tiles.num_sms()
            split, block = lax.div(number, self.column_blocks), lax.rem(number, self.column_blocks)
            first, end = (lax.div((split + side) * self.steps, self.splits) for side in range(2))
            visit(split, block, first, end - first, done)
            return done + end - first

        return lax.fori_loop(0, lax.div(self.units - own + tiles.num_sms() - 1, tiles.num_sms()), step, done)

    def produce(self, own: Any, weights: Any, copy: Callable[[Any, Any], Any], done: Any) -> Any:
        """Asks for the weights of the block's units; the stages asked for then, `done` being those of before.

        Args:
            copy: (weights, number): asks for those of a stage, the n-th.
        """

        def copy_unit(split, block, first, steps, done):
            del split
            columns = pl.ds(block * WGMMA_ROWS, WGMMA_ROWS)

            @pl.loop(0, steps)
            def copy_step(k):
                copy(weights.at[pl.ds((first + k) * DEPTH, DEPTH), columns], done + k)

        return self.for_each(own, copy_unit, done)

    def consume(
        self,
        own: Any,
        scratch: Scratch,
        use: Callable[[Any, Any, jax.Array], None],
        done: Any,
        *,
        bring: Callable[[Any], None] | None = None,
        stage_of: Callable[[Any], Any] | None = None,
        bias: Bias | None = None,
    ) -> Any:
        """Calls `use(split, block of columns, sums)` for each unit; the stages that have been used then.

        Args:
            stage_of: As of `summed_over_stages`.
            bring: Brings the share of the row from its n-th step on, of a block that has one unit; else it is there.
            bias: What the first split has beside its sums.
        """

        def multiply_unit(split, block, first, steps, done):
            more = None if bias is None else bias.of_block(split, block)
            if bring is not None:
                bring(first)

            def multiply(acc, stage, k):
                x = scratch.x.at[:, pl.ds((k if bring is not None else first + k) * DEPTH, DEPTH)]
                plgpu.wgmma(acc, scratch.kernel.at[stage].transpose((1, 0)), x.transpose((1, 0)))

            shape = WGMMA_ROWS, TILED_ROWS
            facts: Any = {"stages": scratch.kernel.shape[0], "shape": shape, "stage_of": stage_of}
            result = summed_over_stages(multiply, scratch, done, steps, **facts)
            use(split, block, result if more is None else result + more)

        return self.for_each(own, multiply_unit, done)


def from_last() -> Any:
    """The block's number from the last one on: those have no unit of a product that has fewer than there are blocks."""
    return jnp.int32(tiles.num_sms() - 1) - lax.axis_index("block")
