"""JAX's search for the layouts of a Mosaic kernel's values, in a fraction of its time and with its results.

JAX 0.11.2 tries layouts for one value after the other, and goes through all constraints of a kernel after each try; it
sorts values by their operations' text, which of a loop is the loop's whole body; and for each operation's constraints
it looks at all that are known. Seconds of a large kernel's
lowering are spent so: 6.5 of 7.8 for the kernel that is a layer of Qwen3-30B-A3B for one token. Constraints that share
no unknown have nothing to do with each other, so each such group is searched by itself here.
"""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import constraints, layout_inference

_search = layout_inference.find_assignments_for
_both = constraints.ConstraintSystem.__and__


def install() -> None:
    """Lets JAX search so from now on, in this process."""
    layout_inference.find_assignments_for = find_assignments_for
    constraints.compute_transitively_equal_vars = compute_transitively_equal_vars
    system: Any = constraints.ConstraintSystem
    system.__and__ = both


def find_assignments_for(
    unknowns: Sequence[constraints.Variable],
    constraint_system: constraints.ConstraintSystem,
    *,
    fuel: int,
    arch: tuple[int, int],
) -> tuple[dict[constraints.Variable, Any] | constraints.Unsatisfiable, int]:
    """Layouts for `unknowns` that satisfy the system; of each group of constraints JAX's first that do.

    Args:
        fuel: How many layouts may be tried.
        arch: The compute capability.

    Returns:
        The layouts, or that there are none; and the fuel that is left.
    """
    reduced = constraints.reduce(constraint_system)
    if isinstance(reduced, constraints.Unsatisfiable):
        return reduced, fuel
    found = dict(reduced.assignments)
    left = [variable for variable in unknowns if variable not in found]
    for group, system in _independent(left, reduced.constraints):
        solution, fuel = _search(group, system, fuel=fuel, arch=arch)
        if isinstance(solution, constraints.Unsatisfiable):
            return solution, fuel
        found |= solution
    wanted = set(unknowns)
    return {variable: layout for variable, layout in found.items() if variable in wanted}, fuel


def both(
    system: constraints.ConstraintSystem, other: constraints.ConstraintSystem | constraints.Unsatisfiable
) -> constraints.ConstraintSystem | constraints.Unsatisfiable:
    """What both ask for; looks at what `other` assigns, where JAX looks at all that the kernel so far does."""
    if isinstance(other, constraints.Unsatisfiable):
        return other
    for variable, layout in other.assignments.items():
        if variable in system.assignments and system.assignments[variable] != layout:
            return constraints.Unsatisfiable()
    return constraints.ConstraintSystem(
        assignments=system.assignments | other.assignments, constraints=[*system.constraints, *other.constraints]
    )


def _independent(
    unknowns: Sequence[constraints.Variable], among: Sequence[constraints.Constraint]
) -> list[tuple[list[constraints.Variable], constraints.ConstraintSystem]]:
    """Groups of unknowns that no constraint joins, each with its constraints, in the order of their first unknowns."""
    groups = _Groups()
    met = [constraints.ConstraintSystem(constraints=[constraint]).unknowns() for constraint in among]
    for variables in met:
        for variable in variables[1:]:
            groups.join(variables[0], variable)
    members: dict[constraints.Variable, list[constraints.Variable]] = {}
    for variable in unknowns:
        members.setdefault(groups.of(variable), []).append(variable)
    theirs: dict[constraints.Variable, list[constraints.Constraint]] = {first: [] for first in members}
    for constraint, variables in zip(among, met, strict=True):
        theirs[groups.of(variables[0])].append(constraint)
    return [(members[first], constraints.ConstraintSystem(constraints=theirs[first])) for first in members]


def compute_transitively_equal_vars(
    system: constraints.ConstraintSystem,
) -> dict[constraints.Variable, list[constraints.Variable]]:
    """For each variable that a constraint calls equal to another, all that it is equal to, in the order of mention."""
    groups, mentioned = _Groups(), dict[constraints.Variable, None]()
    for constraint in system.constraints:
        match constraint:
            case constraints.Equals(lhs=constraints.Variable() as left, rhs=constraints.Variable() as right):
                groups.join(left, right)
                mentioned |= {left: None, right: None}
    members: dict[constraints.Variable, list[constraints.Variable]] = {}
    for variable in mentioned:
        members.setdefault(groups.of(variable), []).append(variable)
    return {variable: [other for other in members[groups.of(variable)] if other != variable] for variable in mentioned}


class _Groups:
    """Which variables belong together."""

    def __init__(self) -> None:
        self._above: dict[constraints.Variable, constraints.Variable] = {}

    def of(self, variable: constraints.Variable) -> constraints.Variable:
        """The one of its group that stands for it."""
        while (above := self._above.get(variable, variable)) != variable:
            self._above[variable] = self._above.get(above, above)
            variable = above
        return variable

    def join(self, one: constraints.Variable, other: constraints.Variable) -> None:
        self._above[self.of(other)] = self.of(one)
