"""The rows of one token's products: each consumer warpgroup makes a share of them, of what all blocks have stored."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.one_row import rounded_sum
from jattn_kernels.mosaic.sm90.common.shared_row import store_of_warps
from jattn_kernels.mosaic.sm90.mlp import compact_row

_THREADS, VECTOR = 128, 8  # of a warpgroup; numbers that a thread has side by side
PIECE = _THREADS * VECTOR


@dataclasses.dataclass(frozen=True)
class Piece:
    """Numbers of a row that a warpgroup makes at a time: the last ones of the row, where there are no others.

    Attributes:
        columns: Of the row, at least as many as a piece has.
        first: Which it would be, if the row went on; those before are in other pieces too.
    """

    columns: int
    first: Any

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((PIECE,), vec_size=VECTOR)

    @property
    def begin(self) -> Any:
        return pl.multiple_of(jnp.minimum(self.first, self.columns - PIECE), compact_row.TOGETHER)

    @property
    def numbers(self) -> jax.Array:
        """Which of the row they are."""
        return plgpu.broadcasted_iota(jnp.int32, (PIECE,), 0, layout=self.layout) + self.begin

    def of(self, row: Any) -> Any:
        """Of a row's ref."""
        return row.at[pl.ds(self.begin, PIECE)]

    def load(self, row: Any) -> jax.Array:
        return plgpu.load(self.of(row), layout=self.layout, optimized=False)

    def put(self, row: Any, numbers: jax.Array) -> None:
        """Stores the piece's numbers; on a GPU those too that are in other pieces, where they are the same."""
        if tiles.interpret_params() is None:
            self.of(row)[...] = numbers
            return
        for own in range(0, PIECE, compact_row.TOGETHER):

            @pl.when(self.begin + own >= self.first)
            def store(own=own):
                row[pl.ds(self.begin + own, compact_row.TOGETHER)] = numbers[own : own + compact_row.TOGETHER]

    def once(self, numbers: jax.Array) -> jax.Array:
        """The piece's numbers, 0 for those that are in others too."""
        return jnp.where(self.numbers < self.first, jnp.zeros_like(numbers), numbers)


def pieces(columns: int, sharers: int, warpgroup: Any) -> list[Piece]:
    """A warpgroup's of a row."""
    return [Piece(columns, begin + warpgroup * PIECE) for begin in range(0, columns, sharers * PIECE)]


def of_all(warpgroup: Any, met: Any, there: Any, numbers: jax.Array) -> Any:
    """The sum of what all warpgroups have; all must ask.

    Args:
        met: (warps,), float32, in shared memory: of the row before last nobody reads there any more.
        there: The barrier at which they meet.
        numbers: Of a piece, none below 0.
    """
    store_of_warps(met, numbers, operator.add, warpgroup)
    plgpu.barrier_arrive(there)
    plgpu.barrier_wait(there)
    return functools.reduce(operator.add, [met[i] for i in range(met.shape[0])])


def given_sum(piece: Piece, x: Any, left: Any) -> jax.Array:
    """x and what is left, in float32, rounded to x's dtype.

    Args:
        x: (1, D), in global memory.
        left: (S, R, D), likewise: the first rows.
    """
    numbers = piece.load(x.at[0]).astype(jnp.float32)
    parts = [piece.load(left.at[i, 0]) for i in range(left.shape[0])]
    return rounded_sum(numbers, functools.reduce(operator.add, parts), dtype=x.dtype)
