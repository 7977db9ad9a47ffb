"""The warps that ask for weights of one token's MLP: each for some shares of the depth of all the block's stages."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common.product_tiles import wait_for_last
from jattn_kernels.mosaic.sm90.mlp.operands import Scratch, Weights
from jattn_kernels.mosaic.sm90.mlp.sizes import STAGES
from jattn_kernels.mosaic.sm90.mlp.units import DEPTH, PARTS, SHARES, SIDE, RowProduct

COPIES = SHARES * PARTS  # of weights that arrive of a stage
_SIDE, _SHARE = SIDE // PARTS, DEPTH // SHARES


def copy_all(products: list[tuple[RowProduct, Weights]], scratch: Scratch, shares: list[Any], group_size: int) -> None:
    """Asks for weights and what groups of them have, from one product into the next, stages ahead.

    Args:
        shares: Numbers of those of the depth.
        group_size: Inputs that have a scale.
    """
    done = jnp.int32(0)
    for product, weights in products:

        def copy_unit(number, block, split, first, steps, done, product=product, weights=weights):
            del number, split

            @pl.loop(0, steps)
            def copy_step(k):
                stage = lax.rem(done + k, STAGES)
                pl.when(done + k >= STAGES)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                for share in shares:
                    _copy(product, weights, scratch, block, (first + k) * DEPTH, stage, share, group_size)

            return done + steps

        done = product.for_each(copy_unit, done)
    wait_for_last(scratch.empty, done, STAGES)


def _copy(
    product: RowProduct, weights: Weights, scratch: Scratch, block: Any, begin: Any, stage: Any, share: Any, size: int
) -> None:
    """A share's weights, and what groups have of as many columns as there are shares of them."""
    kernel: Any = weights.kernel
    full, layer, columns = scratch.full.at[stage], weights.layer[0], product.first_columns(block)
    inputs, first = pl.ds(begin + share * _SHARE, _SHARE), share * SIDE
    if product.is_gated:
        for part, column in enumerate(columns):
            target = scratch.kernel.at[stage, pl.ds(first + part * _SIDE, _SIDE)]
            plgpu.copy_gmem_to_smem(kernel.at[layer, pl.ds(column, _SIDE), inputs], target, full)
    else:
        target = scratch.kernel.at[stage, pl.ds(first, SIDE)]
        plgpu.copy_gmem_to_smem(kernel.at[layer, pl.ds(columns[0], SIDE), inputs], target, full)
        plgpu.barrier_arrive(full)
    groups, column = pl.ds(lax.div(begin, size), DEPTH // size), columns[0] + share * (columns[1] - columns[0])
    for factors, target in zip(weights.of_groups, scratch.of_groups, strict=True):
        source = factors.at[layer, groups, pl.ds(column, _SIDE)]
        plgpu.copy_gmem_to_smem(source, target.at[stage, share, pl.ds(0, DEPTH // size)], full)


assert PARTS == SHARES  # of which each copies the scales of one
