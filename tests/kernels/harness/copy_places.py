"""Where copies from global memory begin in shared memory, as far as a traced function tells.

The interpreter copies to any place; TMA writes to multiples of 128 bytes, and a GPU faults elsewhere.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax

from jattn_kernels.mosaic.sm90.common.tiles import COPY_ALIGNMENT


def misplaced_copies(jaxpr: Any) -> tuple[int, list[str]]:
    """How many copies to shared memory a jaxpr has, and which of them may begin elsewhere.

    A place that an index decides is a multiple of its axis' stride. Slices that begin at data are not looked at.
    """
    copies = [eqn for eqn in _equations(jaxpr) if eqn.primitive.name == "copy_gmem_to_smem"]
    misplaced = [eqn for eqn in copies if any(step % COPY_ALIGNMENT for step in _steps(eqn))]
    return len(copies), [str(eqn.invars[1].aval) for eqn in misplaced]


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _steps(eqn: Any) -> Iterator[int]:
    """Bytes, of which a multiple is where the target begins."""
    first = 3 if eqn.params["has_barrier"] else 2
    first += eqn.params["src_transforms_treedef"].num_leaves
    target = eqn.params["dst_transforms_treedef"]
    for transform in target.unflatten(eqn.invars[first : first + target.num_leaves]):
        for axis, index in enumerate(getattr(transform, "indices", ())):
            stride = math.prod(transform.shape[axis + 1 :]) * eqn.invars[1].aval.dtype.itemsize
            start = getattr(index, "start", 1 if hasattr(index, "aval") else index)
            if isinstance(start, int):
                yield start * stride
