"""Kernels of phases between which blocks wait for each other: one launch on a GPU, one each by the interpreter."""

import dataclasses
from collections.abc import Collection
from typing import Any

from jattn_kernels.mosaic.sm90.common import tiles


def in_one(kernel: Any, operands: Any, made: Any, last: Collection[str]) -> Any:
    """What all of a kernel's phases make.

    Args:
        kernel: A dataclass with `phases` and `run`.
        operands: A NamedTuple, with a field for each thing that a phase leaves to a later one.
        made: A NamedTuple of what may be made, all of it None.
        last: Names of what no later phase needs.
    """
    if tiles.interpret_params() is None:
        return kernel.run(operands)
    for phase in kernel.phases:  # the interpreter has no memory that blocks wait in
        new = dataclasses.replace(kernel, phases=(phase,)).run(operands)
        made = type(made)(*(old if now is None else now for old, now in zip(made, new, strict=True)))
        given = {name: value for name, value in made._asdict().items() if value is not None and name not in last}
        operands = operands._replace(**given)
    return made
