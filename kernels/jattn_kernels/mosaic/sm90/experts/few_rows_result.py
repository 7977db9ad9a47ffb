"""What sums of a grouped product of few rows make: consumers' shares added up, biases, activation, the way out."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.indexed import gather, scatter
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.e2m1_products import place_of
from jattn_kernels.mosaic.sm90.experts.few_rows_sizes import FewRowsSizes
from jattn_kernels.mosaic.sm90.experts.few_rows_units import Unit

_LAYOUT = plgpu.Layout.WG_STRIDED


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewRowsResult:
    """The result of one product.

    Attributes:
        columns: Of the result, not of what an activation takes.
        num_slots, activation: As of `few_rows_product`.
        dtype: Of the result.
    """

    sizes: FewRowsSizes
    columns: int
    num_slots: int
    activation: Callable[[Any, Any], Any] | None
    dtype: Any

    @property
    def parts(self) -> int:
        """Parts of a product's 64 columns that lie apart."""
        return 1 if self.activation is None else 2

    @property
    def block_columns(self) -> int:
        """Columns of the result that a unit computes."""
        return WGMMA_ROWS // self.parts

    def store(self, out: Any, unit: Unit, expert: Any, sums: Any, bias: Any) -> None:
        """Adds a unit's sums up: a thread has some numbers of the result, neighbours those of neighbouring columns.

        Args:
            expert: Its number among those of all layers.
            sums: Of each consumer, in shared memory.
            bias: As in FewRowsOperands.
        """
        least = 0
        for count in self.sizes.row_counts:
            enough = (unit.rows > least) & (unit.rows <= count)
            pl.when(enough)(functools.partial(self._store_rows, out, unit, expert, sums, bias, count))
            least = count

    def _store_rows(self, out: Any, unit: Unit, expert: Any, sums: Any, bias: Any, count: int) -> None:
        """The same of at most so many rows."""
        side, (consumers, columns, width) = self.block_columns, sums.shape
        layout = _LAYOUT((count * side,), vec_size=1)
        number = plgpu.broadcasted_iota(jnp.int32, (count * side,), 0, layout=layout)
        row, column = number // side, number % side
        halves = []
        for part in range(self.parts):
            places = (
                (place_of(column + part * side, share, self.sizes.shares) + consumer * columns) * width + row
                for consumer in range(consumers)
                for share in range(self.sizes.shares)
            )
            total = functools.reduce(jnp.add, [gather(sums, each, layout) for each in places])
            if bias is not None:
                at = (expert * self.parts + part) * self.columns + unit.block * side + column
                share = jnp.where(unit.split == 0, 1.0, 0.0)
                total += gather(bias, at, layout).astype(jnp.float32) * share
            halves.append(total)
        result = halves[0] if self.activation is None else self.activation(*halves)
        begin = (unit.split * self.num_slots + unit.first) * self.columns + unit.block * side
        self._store_numbers(out, begin, result.astype(self.dtype), row, column, unit.rows)

    def _store_numbers(self, out: Any, begin: Any, result: jax.Array, row: Any, column: Any, rows: Any) -> None:
        """A unit's numbers of so many rows, of which the first begins there."""
        side = self.block_columns
        if tiles.interpret_params() is None:
            place = jnp.where(row < rows, begin + row * self.columns + column, -1)
            scatter(out, place, result, _LAYOUT(result.shape, vec_size=1))
            return
        for number in range(result.shape[0] // side):  # at once, what the interpreter takes time for

            @pl.when(number < rows)
            def store_row(number=number):
                out[pl.ds(begin + number * self.columns, side)] = result[number * side : (number + 1) * side]
