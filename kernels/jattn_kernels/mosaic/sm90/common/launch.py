"""The launch of a kernel: what Mosaic and XLA must be told of every one.

XLA hands a custom call a contiguous slice as a view, and writes a result that is stacked through one, at any multiple
of 128 bytes; Mosaic takes addresses at multiples of 256 only. No rewrite reaches through an optimization barrier, so
that operands and results have buffers of their own. There is one barrier for all operands and one for all results: a
barrier for each operand by itself cannot be scheduled in a loop that XLA unrolls late, where the operand is part of the
loop's state. A joint one adds no copy but those of the views.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles


def kernel(
    body: Callable[..., None],
    *,
    num_threads: int = 1,
    reduction_bytes: int = tiles.REDUCTION_BYTES,
    auto_barriers: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """`plgpu.kernel` as all of ours are launched.

    Args:
        num_threads: Warpgroups of a block.
        reduction_bytes: Shared memory for reductions across warps.
        auto_barriers: Whether a warpgroup's warps meet before and after each of its stores. A body that goes without
            says itself where they must.
        options: Others of `plgpu.kernel`.
    """
    params = plgpu.CompilerParams(
        approx_math=True, reduction_scratch_bytes=reduction_bytes, unsafe_no_auto_barriers=not auto_barriers
    )
    launch: Any = plgpu.kernel(
        body,
        num_threads=num_threads,
        thread_name="warpgroup",
        compiler_params=params,
        interpret=tiles.interpret_params(),
        **options,
    )

    def run(*operands: Any) -> Any:
        return _own_buffers(launch(*_own_buffers(operands)))

    return run


def frozen(*refs: Any) -> tuple[jax.Array, ...]:
    """The arrays of Refs that a kernel has written into."""
    return _own_buffers(tuple(jax.freeze(ref) for ref in refs))


def _own_buffers(values: Any) -> Any:
    """Values behind one barrier, but for Refs: a barrier would read those."""
    leaves, tree = jax.tree.flatten(values)
    arrays = [leaf for leaf in leaves if not isinstance(leaf, jax.Ref)]
    if not arrays:
        return values
    behind = iter(lax.optimization_barrier(arrays))
    return jax.tree.unflatten(tree, [leaf if isinstance(leaf, jax.Ref) else next(behind) for leaf in leaves])
