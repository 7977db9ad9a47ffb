"""The gate's and the up projection's product of many rows on Hopper, with the activation in its epilogue.

grid (blocks)            an SM each; takes every blocks-th work tile: 128 rows, 128 hidden units
  producer warpgroup     TMA: the rows, and both blocks of columns of the weights, stages ahead, across work tiles
  consumer warpgroups    64 rows each: the sums of the gate's columns and of the up projection's, then the activation
  full                   producer -> consumers: a stage has arrived
  empty                  consumers -> producer: the stage may be overwritten

Both sums of a hidden unit are in the same registers, so neither is stored: half as much leaves, and nothing reads it
again. Work tiles of the same hidden units are neighbours in time: the L2 cache has their weights from the first on.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.call import MatmulCall
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.product_tiles import wait_for_last
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.operands import MatmulOperands

_DTYPES = ("bfloat16", "float16")
UNITS = 128  # hidden units of a work tile
_CONSUMERS, _STAGES = 2, 4
_ROWS = _CONSUMERS * WGMMA_ROWS  # of a work tile
_DEPTH = 64  # of a stage: what a swizzled row of shared memory holds
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
_MOST_NEIGHBOURS = 24  # work tiles of the same hidden units that are computed at about the same time


class _Scratch(NamedTuple):
    x: Any  # (stages, 128, 64)
    kernel: Any  # (stages, 2, 64, 128)
    out: Any  # (consumers, 64, 128)
    full: Any
    empty: Any


class _Operands(NamedTuple):
    x: Any
    kernel: Any
    layer: Any


class _Tile(NamedTuple):
    row_block: Any
    unit_block: Any


def refuses(call: MatmulCall) -> str | None:
    """Why the activation after a product cannot be taken with it, or None."""
    if call.dtype not in _DTYPES or call.kernel_dtype != call.dtype or call.out_dtype != call.dtype:
        return (
            "`mosaic` takes an activation after products of bfloat16 or float16 alone, not of "
            f"{call.dtype} rows and {call.kernel_dtype} weights into {call.out_dtype}."
        )
    if call.norm is not None:
        return "`mosaic` takes no norm before a product with weights that are not in int4 and an activation after it."
    units = call.columns // 2
    if call.num_rows % TILED_ROWS or call.columns % 2 or call.depth % _DEPTH or units % UNITS:
        return (
            f"`mosaic` takes an activation after products of a multiple of {TILED_ROWS} rows, {_DEPTH} inputs and "
            f"{UNITS} hidden units, not of {call.num_rows}, {call.depth} and {units}."
        )
    work_tiles = pl.cdiv(call.num_rows, _ROWS) * units // UNITS
    if call.num_rows <= _ROWS or work_tiles < tiles.num_sms():
        return (
            f"`mosaic` takes an activation after products of more than {_ROWS} rows that all SMs have work of, not of "
            f"{call.num_rows} and {units} hidden units."
        )
    return None


def gated_matmul(call: MatmulCall, operands: MatmulOperands) -> Float[Array, "T F"]:
    """The gate of x @ the kernel's first half of columns, and of x @ the other half, all in float32; cast once."""
    assert call.gate is not None
    product = _Product(
        rows=call.num_rows, depth=call.depth, units=call.columns // 2, gate=call.gate, dtype=jnp.dtype(call.dtype)
    )
    given = _Operands(operands.x, operands.kernel, operands.layer_index.reshape(1))
    leaves, tree = jax.tree.flatten(given)
    run = launch.kernel(
        functools.partial(product.body, tree),
        out_type=[jax.ShapeDtypeStruct((product.rows, product.units), product.dtype)],
        grid=(product.num_blocks,),
        grid_names=("block",),
        num_threads=_CONSUMERS + 1,
        reduction_bytes=0,
        kernel_name="gated_matmul",
    )
    (out,) = run(*leaves)
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    rows: int
    depth: int
    units: int
    gate: Callable[[Any, Any], Any]
    dtype: Any

    @property
    def steps(self) -> int:
        return pl.cdiv(self.depth, _DEPTH)

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.rows, _ROWS)

    @property
    def unit_blocks(self) -> int:
        return pl.cdiv(self.units, UNITS)

    @property
    def neighbours(self) -> int:
        """Work tiles of the same hidden units that come one after the other: about as many in each group."""
        return pl.cdiv(self.row_blocks, pl.cdiv(self.row_blocks, _MOST_NEIGHBOURS))

    @property
    def num_blocks(self) -> int:
        return min(self.row_blocks * self.unit_blocks, tiles.num_sms())

    def body(self, tree: Any, *refs: Any) -> None:
        operands, out = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves]
        stages: dict[str, Any] = {"num_barriers": _STAGES}
        scratch = _Scratch(
            x=tiles.tile((_STAGES, _ROWS, _DEPTH), self.dtype),
            kernel=tiles.tile((_STAGES, 2, _DEPTH, UNITS), self.dtype, copied_columns=_DEPTH),
            out=tiles.tile((_CONSUMERS, WGMMA_ROWS, UNITS), self.dtype, copied_columns=_DEPTH),
            full=plgpu.Barrier(num_arrivals=3, **stages),
            empty=plgpu.Barrier(num_arrivals=_CONSUMERS, **stages),
        )

        def warpgroup(scratch: _Scratch) -> None:
            number = lax.axis_index("warpgroup")

            @pl.when(number == _CONSUMERS)
            def produce():
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
                self._produce(operands, scratch)

            @pl.when(number < _CONSUMERS)
            def consume():
                plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
                self._consume(out, scratch, number)

        pl.run_scoped(warpgroup, scratch, collective_axes="warpgroup")

    def _for_each_tile(self, visit: Callable[[_Tile, Any], None]) -> Any:
        """Calls `visit(work tile, steps before it)` for each of the block's; the steps in all."""
        own = lax.axis_index("block")

        def visit_tile(i, done):
            group, rest = _divided(own + i * self.num_blocks, self.neighbours * self.unit_blocks)
            before = group * self.neighbours
            units, row = _divided(rest, jnp.minimum(self.neighbours, self.row_blocks - before))
            visit(_Tile(before + row, units), done)
            return done + self.steps

        tiles_here = lax.div(self.row_blocks * self.unit_blocks - own + self.num_blocks - 1, self.num_blocks)
        return lax.fori_loop(0, tiles_here, visit_tile, jnp.int32(0))

    def _produce(self, operands: _Operands, scratch: _Scratch) -> None:
        layer = operands.layer[0]

        def copy_tile(tile: _Tile, done):
            rows = pl.ds(tile.row_block * _ROWS, _ROWS)

            @pl.loop(0, self.steps)
            def copy_step(k):
                stage = lax.rem(done + k, _STAGES)
                pl.when(done + k >= _STAGES)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                depth, full = pl.ds(k * _DEPTH, _DEPTH), scratch.full.at[stage]
                plgpu.copy_gmem_to_smem(operands.x.at[rows, depth], scratch.x.at[stage], full)
                for part in range(2):
                    columns = pl.ds(part * self.units + tile.unit_block * UNITS, UNITS)
                    weights = operands.kernel.at[layer, depth, columns]
                    plgpu.copy_gmem_to_smem(weights, scratch.kernel.at[stage, part], full)

        steps = self._for_each_tile(copy_tile)
        wait_for_last(scratch.empty, steps, _STAGES)

    def _consume(self, out: Any, scratch: _Scratch, number: Any) -> None:
        first = pl.multiple_of(number * WGMMA_ROWS, WGMMA_ROWS)
        own, staging = pl.ds(first, WGMMA_ROWS), scratch.out.at[number]

        def multiply_tile(tile: _Tile, done):
            def product(*sums):
                @pl.loop(0, self.steps)
                def multiply_step(k):
                    stage = lax.rem(done + k, _STAGES)
                    plgpu.barrier_wait(scratch.full.at[stage])
                    for part, acc in enumerate(sums):
                        plgpu.wgmma(acc, scratch.x.at[stage, own], scratch.kernel.at[stage, part])
                    plgpu.wgmma_wait(2)  # those of the last step are done

                    @pl.when(k > 0)
                    def free():
                        plgpu.barrier_arrive(scratch.empty.at[lax.rem(done + k - 1, _STAGES)])

                return [acc[...] for acc in sums]

            gate, up = pl.run_scoped(product, *(tiles.accumulator(WGMMA_ROWS, UNITS) for _ in range(2)))
            plgpu.barrier_arrive(scratch.empty.at[lax.rem(done + self.steps - 1, _STAGES)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before
            staging[...] = self.gate(gate, up).astype(self.dtype)
            plgpu.commit_smem()
            rows = pl.ds(tile.row_block * _ROWS + first, WGMMA_ROWS)
            plgpu.copy_smem_to_gmem(staging, out.at[rows, pl.ds(tile.unit_block * UNITS, UNITS)])

        self._for_each_tile(multiply_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _divided(number: Any, by: Any) -> tuple[Any, Any]:
    return lax.div(number, by), lax.rem(number, by)
