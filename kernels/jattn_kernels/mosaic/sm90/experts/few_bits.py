"""The grouped product of weights of 8 or 4 bits: rows in two terms of fp8, products on Hopper's tensor cores in fp8.

As the product of weights of 16 bits (`GroupedProduct`), whose work tiles it has, but for these:

  weights                 lie with their outputs first, as wgmma reads 8-bit operands along the depth only
  producer warpgroup      TMA for the rows too: they stand in their slots, both terms of each
  consumer warpgroups     acc^T = w x^T of a scale's depth, both terms; sums += acc^T times the scale, in float32. Of
                          few rows the terms are columns of one product, and their sums are added up in the end

Tensor cores keep some 13 bits of a sum in fp8 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2): so none is of more than
128 inputs. Weights of 4 bits become fp8 in registers, exactly; each 32 inputs have a scale, and a product of theirs.
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
from jaxtyping import Array, Float, Float32, Int, Shaped

from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.product_tiles import wait_for_last
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.e2m1 import as_fp8, power_of_two
from jattn_kernels.mosaic.sm90.experts.grouped_product import PAIR, GroupedProduct, WorkTile
from jattn_kernels.mosaic.sm90.experts.tile_sizes import ProductTiles, rows_of_scales
from jattn_kernels.mosaic.sm90.experts.two_terms import TERMS
from jattn_kernels.mxfp4 import GROUP
from jattn_kernels.quantized import FP8, MXFP4, NUMBERS_OF_BYTE, ScalesKind

_BLOCK_DEPTH = 128  # of a stage of weights of 8 bits
_PACKED_DEPTH = 160  # of 4 bits: rows of 80 bytes, of which threads read 8 without waiting for each other
_MOST_SUMS = 128  # rows of all products that a consumer has under way at once: each takes half a register
_ROWS_BESIDE = 16  # up to which the next weights are made wider while products are under way: registers, again
_ROWS_JOINED = 16  # up to which both terms of the rows are columns of one product: its weights are what it costs


class FewBitsOperands(NamedTuple):
    """What the kernel reads.

    Attributes:
        x: Rows in their slots, in two terms of fp8; as deep as whole stages, and as many as whole tiles.
        x_scales: Their factors.
        kernel: Weights of all layers, in fp8, or bytes of two of e2m1.
        scales: Of each output [L, E, C], of each block [L, E, C / height, K / depth], of each 32 inputs [L, E, G, C].
        bias, layer, work, num_tiles: As in ProductOperands.
    """

    x: Float[Array, "2 S K"]
    x_scales: Float32[Array, " S"]
    kernel: Shaped[Array, "L E C _"]
    scales: Shaped[Array, "L E ..."]
    bias: Float[Array, "L E C"] | None
    layer: Int[Array, "1"]
    work: Int[Array, "tiles 3"]
    num_tiles: Int[Array, "1"]


class _Scratch(NamedTuple):
    kernel: Any  # (stages, 2, 64 a consumer, 128), or 80 bytes
    scales: Any  # (stages, 2, 5 and those left free, 64 a consumer) of groups; None of others
    x: Any  # (stages, 2 * block_rows, 128 or 160)
    out: Any  # (consumers, block_rows, 64)
    full: Any
    empty: Any
    wide: Any  # (consumers, 2, 64, 160): where the interpreter keeps what became fp8; None on a GPU


def few_bits_product(
    operands: FewBitsOperands,
    sizes: ProductTiles,
    scales: ScalesKind,
    dtype: Any,
    *,
    num_slots: int,
    activation: Callable[[Any, Any], Any] | None = None,
    columns: slice | None = None,
    width: int | None = None,
) -> Float[Array, "S C_out"]:
    """`grouped_product` of such weights, in `dtype`.

    Args:
        scales: What of the weights has one of its own.
        width: Columns of the result, of which whatever memory held is in those past the computed ones.
    """
    wide = operands.kernel.shape[2]
    columns = columns or slice(0, wide if activation is None else wide // 2)
    leaves, tree = jax.tree.flatten(operands)
    product = _FewBitsProduct(
        sizes=sizes,
        depth=operands.kernel.shape[3] * (NUMBERS_OF_BYTE if operands.kernel.dtype == MXFP4 else 1),
        first_column=columns.start,
        columns=columns.stop - columns.start,
        activation=activation,
        dtype=dtype,
        packed=operands.kernel.dtype == MXFP4,
        scales=scales,
    )
    run = launch.kernel(
        functools.partial(product.body, tree),
        out_type=jax.ShapeDtypeStruct((num_slots, width or product.columns), dtype),
        grid=(tiles.num_sms(),),
        grid_names=("block",),
        num_threads=sizes.consumers + 1,
        kernel_name="few_bits_product",
    )
    return run(*leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FewBitsProduct(GroupedProduct):
    packed: bool
    scales: ScalesKind

    @property
    def block_depth(self) -> int:
        return _PACKED_DEPTH if self.packed else _BLOCK_DEPTH

    @property
    def groups(self) -> int:
        """Scales of a stage's depth."""
        return self.block_depth // GROUP if self.packed else 1

    def scratch(self) -> Any:
        sizes, side = self.sizes, self.side
        stages: dict[str, Any] = {"num_barriers": sizes.stages}
        kernel = sizes.stages, PAIR, side, self.block_depth
        packed = (*kernel[:-1], self.block_depth // NUMBERS_OF_BYTE)
        rows = sizes.stages, TERMS * sizes.block_rows, self.block_depth
        scales = sizes.stages, PAIR, rows_of_scales(side), side
        return _Scratch(
            kernel=plgpu.SMEM(packed, MXFP4) if self.packed else tiles.tile(kernel, FP8),
            scales=plgpu.SMEM(scales, jnp.uint8) if self.packed else None,
            x=tiles.tile(rows, FP8, copied_columns=self.block_depth // self.groups),
            out=tiles.tile((sizes.consumers, sizes.block_rows, WGMMA_ROWS), self.dtype),
            full=plgpu.Barrier(num_arrivals=TERMS + PAIR * (2 if self.packed else 1), **stages),
            empty=plgpu.Barrier(num_arrivals=sizes.consumers, **stages),
            wide=tiles.probabilities_tile((sizes.consumers, PAIR, WGMMA_ROWS, self.block_depth), FP8)
            if self.packed
            else None,
        )

    def produce(self, operands: Any, scratch: Any) -> None:
        stages, layer = self.sizes.stages, operands.layer[0]
        width = scratch.kernel.shape[-1]

        def copy_tile(tile: WorkTile, done):
            def copy_step(k, step):
                stage = lax.rem(step, stages)
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                full, inputs = scratch.full.at[stage], pl.ds(k * width, width)
                for part in range(PAIR):
                    columns = pl.ds(self.weight_column(tile, part), self.side)
                    weights = operands.kernel.at[layer, tile.expert, columns, inputs]
                    plgpu.copy_gmem_to_smem(weights, scratch.kernel.at[stage, part], full)
                    if self.packed:
                        groups = pl.ds(k * self.groups, self.groups)
                        scales = operands.scales.at[layer, tile.expert, groups, columns]
                        target = scratch.scales.at[stage, part, pl.ds(0, self.groups)]
                        plgpu.copy_gmem_to_smem(scales, target, full)
                least = 0
                for count in self.sizes.row_counts:
                    enough = (tile.rows > least) & (tile.rows <= count)
                    pl.when(enough)(functools.partial(copy_rows, tile, k, stage, count))
                    least = count
                return step + 1

            return lax.fori_loop(0, self.steps, copy_step, done)

        def copy_rows(tile: WorkTile, k: Any, stage: Any, count: int) -> None:
            rows = pl.ds(pl.multiple_of(tile.first, TILED_ROWS), count)
            for term in range(TERMS):
                source = operands.x.at[term, rows, pl.ds(k * self.block_depth, self.block_depth)]
                target = scratch.x.at[stage, pl.ds(term * self._term_stride(count), count)]
                plgpu.copy_gmem_to_smem(source, target, scratch.full.at[stage])

        wait_for_last(scratch.empty, self.for_each_tile(operands, copy_tile), stages)

    def _term_stride(self, count: int) -> int:
        """Rows in shared memory from one term to the next."""
        return count if count <= _ROWS_JOINED else self.sizes.block_rows

    def _products(self, count: int) -> list[Any]:
        """The rows of each product with the same weights: of both terms at once, or of each."""
        if count <= _ROWS_JOINED:
            return [pl.ds(0, TERMS * count)]
        return [pl.ds(term * self._term_stride(count), count) for term in range(TERMS)]

    def multiply(
        self, operands: Any, out: Any, scratch: Any, warpgroup: Any, tile: WorkTile, count: int, done: Any
    ) -> None:
        stages, shape = self.sizes.stages, (WGMMA_ROWS, count)
        width = self._products(count)[0].size

        def multiply_step(k, carry):
            totals, factors = carry
            stage = lax.rem(done + k, stages)
            plgpu.barrier_wait(scratch.full.at[stage])
            following = self._block_factors(operands, tile, warpgroup, k + 1)
            totals = self._added(list(totals), factors, scratch, stage, warpgroup, count)
            plgpu.barrier_arrive(scratch.empty.at[stage])
            return tuple(totals), following

        none = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
        start = (none,) * PAIR, self._block_factors(operands, tile, warpgroup, 0)
        totals, _ = lax.fori_loop(0, self.steps, multiply_step, start)
        if width > count:
            totals = [total[:, :count] + total[:, count:] for total in totals]
        of_rows = plgpu.load(
            operands.x_scales.at[pl.ds(tile.first, count)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
        )
        results = [total * lax.broadcast_in_dim(of_rows, shape, [1]) for total in totals]
        if self.scales == "channel":
            results = [
                result * self.of_columns(operands.scales, operands.layer[0], tile, part, warpgroup, count)
                for part, result in enumerate(results)
            ]
        self.finish(operands, out, scratch.out.at[warpgroup], warpgroup, tile, count, results)

    def _block_factors(self, operands: Any, tile: WorkTile, warpgroup: Any, k: Any) -> tuple[Any, ...]:
        """Of a consumer's blocks of columns in a step, which is read one ahead; nothing of other scales."""
        if self.scales != "block":
            return ()
        _, _, blocks, steps = operands.scales.shape
        height, depth = operands.kernel.shape[2] // blocks, self.depth // steps
        columns = [self.weight_column(tile, part) + warpgroup * WGMMA_ROWS for part in range(PAIR)]
        at = lax.div(jnp.minimum(k, self.steps - 1) * self.block_depth, depth)
        return tuple(
            operands.scales[operands.layer[0], tile.expert, jnp.minimum(lax.div(column, height), blocks - 1), at]
            for column in columns
        )

    def _added(
        self, totals: list[Any], block_factors: tuple[Any, ...], scratch: Any, stage: Any, warpgroup: Any, count: int
    ) -> list[Any]:
        """The sums with a stage's products, each times its scale; so many products at once as there are registers."""
        own = pl.ds(pl.multiple_of(warpgroup * WGMMA_ROWS, WGMMA_ROWS), WGMMA_ROWS)
        products = self._products(count)
        width = products[0].size
        batches, ready = self._batches(width), {}
        early = self.packed and scratch.wide is None and count <= _ROWS_BESIDE

        def prepared(number: int) -> dict[int, Any]:
            """Scales and weights of the parts that are new in a batch."""
            parts = {part for part, _ in batches[number]} if number < len(batches) else set()
            return {
                part: (
                    self._factors(block_factors, scratch, stage, own, part),
                    self._weights(scratch, stage, own, warpgroup, part),
                )
                for part in sorted(parts - ready.keys())
            }

        ready.update(prepared(0))
        for number, batch in enumerate(batches):

            def product(*sums, batch=batch, number=number):
                for acc, (part, group) in zip(sums, batch, strict=True):
                    for rows in products:
                        self._start(acc, ready[part][1], group, scratch.x.at[stage, rows])
                following = prepared(number + 1) if early else {}  # beside the products
                plgpu.wgmma_wait(0)
                return [acc[...] for acc in sums], following

            results, following = pl.run_scoped(product, *(tiles.accumulator(WGMMA_ROWS, width) for _ in batch))
            ready.update(following)
            ready.update(prepared(number + 1))
            for (part, group), result in zip(batch, results, strict=True):
                factor = ready[part][0][group]
                if self.packed:
                    factor = lax.broadcast_in_dim(factor, result.shape, [0])
                totals[part] += result if factor is None else result * factor
        return totals

    def _batches(self, width: int) -> list[list[tuple[int, int]]]:
        """Parts and groups whose products, of so many columns, are under way at once."""
        if not self.packed:
            both = [(part, 0) for part in range(PAIR)]
            return [both] if PAIR * width <= _MOST_SUMS else [[each] for each in both]
        at_once = max(1, _MOST_SUMS // 2 // width)
        begins = range(0, self.groups, at_once)
        return [
            [(part, group) for group in range(begin, min(begin + at_once, self.groups))]
            for part in range(PAIR)
            for begin in begins
        ]

    def _weights(self, scratch: Any, stage: Any, own: Any, warpgroup: Any, part: int) -> Any:
        """A consumer's weights of a stage, in fp8: where they were copied to, or in registers."""
        weights = scratch.kernel.at[stage, part, own]
        if not self.packed:
            return weights
        if scratch.wide is None:
            return as_fp8(weights)
        scratch.wide[warpgroup, part] = as_fp8(weights)
        plgpu.commit_smem()
        return scratch.wide.at[warpgroup, part]

    def _start(self, acc: Any, weights: Any, group: int, x: Any) -> None:
        """Starts the product of a group's depth."""
        depth = self.block_depth // self.groups
        inputs = pl.ds(group * depth, depth)
        if self.groups > 1:
            x = x.at[:, inputs]
            is_ref = isinstance(weights, jax.Array)
            weights = weights[:, group * depth : (group + 1) * depth] if is_ref else weights.at[:, inputs]
        plgpu.wgmma(acc, weights, x.transpose((1, 0)))

    def _factors(self, block_factors: tuple[Any, ...], scratch: Any, stage: Any, own: Any, part: int) -> list[Any]:
        """Scales of products before they are added up: a group's of each column, a block's; None of others."""
        if not self.packed:
            return [block_factors[part] if block_factors else None]
        exponents = [scratch.scales.at[stage, part, group, own] for group in range(self.groups)]
        layout = plgpu.Layout.WGMMA.reduce(1)
        return [power_of_two(plgpu.load(each, layout=layout, optimized=False)) for each in exponents]
