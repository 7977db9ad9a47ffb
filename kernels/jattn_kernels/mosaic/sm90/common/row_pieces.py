"""A row in the registers of one warpgroup, in pieces: 1,024 numbers, or a multiple, are loaded at a time.

Of a row that is no multiple of them the last 1,024 are a piece of their own, whose first numbers were in the piece
before: what is computed of these is stored twice, the same both times, and counts once.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

THREADS, VECTOR = 128, 8  # numbers that a thread loads at once
LEAST = THREADS * VECTOR  # numbers of a row
MULTIPLE = 64  # of numbers that rows are


class Piece(NamedTuple):
    """Numbers of a row that are loaded together, of which the first `again` are in an earlier piece too."""

    begin: int
    size: int
    again: int

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=VECTOR)

    def of(self, row: Any) -> Any:
        """Of a row's ref this piece's."""
        return row if self.size == row.shape[0] else row.at[pl.ds(self.begin, self.size)]

    def load(self, row: Any) -> jax.Array:
        return plgpu.load(self.of(row), layout=self.layout, optimized=False)

    @property
    def numbers(self) -> jax.Array:
        """Which of the row they are."""
        return plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout) + self.begin

    def once(self, numbers: jax.Array) -> jax.Array:
        """The piece's numbers, 0 for those that are in an earlier one."""
        if not self.again:
            return numbers
        number = plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout)
        return jnp.where(number < self.again, jnp.zeros_like(numbers), numbers)


def pieces(columns: int) -> list[Piece]:
    """Those of a row of so many numbers, at least `LEAST`."""
    whole = columns // LEAST * LEAST
    last = [] if columns == whole else [Piece(columns - LEAST, LEAST, whole + LEAST - columns)]
    return [Piece(0, whole, 0), *last]
