"""What products share whose operands come in stages: work tiles, the sum over stages, and the end of their copies."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles


class ProductTile(NamedTuple):
    """Blocks of rows and of columns, and the steps of a share of the depth."""

    row_block: Any
    column_block: Any
    split: Any
    first: Any
    steps: Any


def summed_over_stages(
    multiply: Callable[[Any, Any, Any], None],
    scratch: Any,
    done: Any,
    steps: Any,
    *,
    stages: int,
    shape: tuple[int, int],
    stage_of: Callable[[Any], Any] | None = None,
) -> jax.Array:
    """The sum of what is multiplied in each of so many steps, once a step's operands have arrived.

    Args:
        multiply: (accumulator, stage, step): begins the products of a step. The stage before is free once they run.
        scratch: Has the barriers `full` and `empty` of each stage.
        done: Steps of before, of all stages.
        shape: Of the sum.
        stage_of: The stage of a step, counted with those of before; if None they come in turn.
    """
    find = stage_of or functools.partial(lax.rem, y=stages)

    def product(acc):
        @pl.loop(0, steps)
        def multiply_step(k):
            stage = find(done + k)
            plgpu.barrier_wait(scratch.full.at[stage])
            multiply(acc, stage, k)
            plgpu.wgmma_wait(1)  # that of the last step is done

            @pl.when(k > 0)
            def free():
                plgpu.barrier_arrive(scratch.empty.at[find(done + k - 1)])

        return acc[...]

    result = pl.run_scoped(product, tiles.accumulator(*shape))
    plgpu.barrier_arrive(scratch.empty.at[find(done + steps - 1)])
    return result


def wait_for_last(empty: Any, steps: Any, stages: int) -> None:
    """Waits until what was copied in the last of so many steps is no longer needed."""

    @pl.loop(jnp.maximum(steps, stages), steps + stages)
    def wait(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, stages)])
