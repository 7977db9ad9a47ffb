"""What the consumers' sums of one token's MLP make: biases, activation, the way out."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.columns import LAYOUT, put_columns
from jattn_kernels.mosaic.sm90.common.indexed import gather
from jattn_kernels.mosaic.sm90.common.row_pieces import pieces
from jattn_kernels.mosaic.sm90.common.tiles import WARPS
from jattn_kernels.mosaic.sm90.mlp.operands import Made, Scratch, Weights
from jattn_kernels.mosaic.sm90.mlp.sizes import BUFFERS, CONSUMERS
from jattn_kernels.mosaic.sm90.mlp.stage_products import SUMS, place_of
from jattn_kernels.mosaic.sm90.mlp.units import PARTS, SIDE, RowProduct


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpResult:
    """Of all products; by one warpgroup.

    Attributes:
        columns: Of the token.
        activation: Of both halves of the gated product.
        dtype: Of the token.
        total: Units that a block has of all products.
    """

    columns: int
    activation: Callable[[Any, Any], Any]
    dtype: Any
    total: Any

    def store(
        self,
        phase: str,
        product: RowProduct,
        weights: Weights,
        before: Any,
        made: Made,
        rooms: dict[str, Any],
        scratch: Scratch,
    ) -> None:
        """All of a product's units of the block.

        Args:
            before: Units of products before it.
            rooms: For what other blocks wait for, by phases; a launch of one phase stores what it makes there alone.
        """

        def finish_unit(number, block, split, first, steps, carry):
            del first, steps
            place = lax.rem(before + number, BUFFERS)
            plgpu.barrier_wait(scratch.summed.at[place])
            result = self._made(product, weights, block, split, scratch.sums.at[place])
            pl.when(before + number + BUFFERS < self.total)(lambda: plgpu.barrier_arrive(scratch.free.at[place]))
            begin = block * product.side
            if phase == "next":
                self._store_rows(made.next, split, begin, result)
                return carry
            if phase == "down":
                stride = made.parts.shape[1] * self.columns
                put_columns(made.parts, split * stride + begin, result, product.side)
                if made.next is None:
                    return carry
            room = rooms[phase]
            if phase == "gated":
                room.store(begin, result.astype(self.dtype))
                return carry
            put_columns(room.ref, room.begin + split * room.stride + begin, result, product.side, told=True)
            return carry

        product.for_each(finish_unit, 0)

    def _made(self, product: RowProduct, weights: Weights, block: Any, split: Any, sums: Any) -> jax.Array:
        """Each thread has one of a unit's numbers, of which there are fewer than threads: some several times."""
        side = product.side
        column = lax.rem(plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=LAYOUT), side)

        def of_part(part: int) -> jax.Array:
            places = [place_of(column + part * side, warp) for warp in range(WARPS)]
            places = [place + consumer * SUMS for consumer in range(CONSUMERS) for place in places]
            return functools.reduce(jnp.add, [gather(sums, place, LAYOUT) for place in places])

        if product.is_gated:
            return self.activation(*(of_part(part) for part in range(PARTS)))
        result = of_part(0)
        if weights.bias is None:
            return result
        place = weights.layer[0] * product.columns + block * side + column
        return result + gather(weights.bias, place, LAYOUT).astype(jnp.float32) * jnp.where(split == 0, 1.0, 0.0)

    def _store_rows(self, out: Any, split: Any, begin: Any, result: jax.Array) -> None:
        """A unit's columns of a row, and zeros in the rows behind it."""
        for row in range(WARPS):
            place = (split * WARPS + row) * out.shape[2] + begin
            put_columns(out, place, None if row else result, SIDE)

    def clear(self, parts: Any) -> None:
        """Stores the block's share of the zeros below the result."""
        if parts is None:
            return
        splits, rows, columns = parts.shape
        below, own, sms = rows - 1, lax.axis_index("block"), tiles.num_sms()

        @pl.loop(0, lax.div(splits * below - own + sms - 1, sms))
        def clear_row(i):
            number = own + i * sms
            row = parts.at[lax.div(number, below), 1 + lax.rem(number, below)]
            for piece in pieces(columns):
                piece.of(row)[...] = plgpu.layout_cast(jnp.zeros((piece.size,), parts.dtype), piece.layout)
