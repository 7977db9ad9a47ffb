"""Layouts that are searched group by group are those that JAX's own search finds, and found in fewer steps."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import pytest
from jax.experimental.mosaic.gpu import constraints, layout_inference
from jax.experimental.mosaic.gpu import fragmented_array as fa

import jattn_kernels
from jattn_kernels.call import Device
from jattn_kernels.mosaic import layout_search
from tests.kernels.harness.case_table import build
from tests.kernels.harness.kernel_sized_cases import KERNEL_SIZED

SPLAT, TILED = fa.WGSplatFragLayout((64, 64)), fa.WGMMA_LAYOUT


@dataclasses.dataclass(frozen=True)
class Site:
    name: str
    shape: tuple[int, ...] = (64, 64)
    memory_space: constraints.MemorySpace = constraints.MemorySpace.REG


A, B, C, D, E = (constraints.Variable(Site(name)) for name in "abcde")


def searched(*given, fuel=100) -> Any:
    system = constraints.ConstraintSystem(constraints=list(given))
    return layout_search.find_assignments_for([A, B, C, D, E], system, fuel=fuel, arch=(9, 0))


def either(variable, *layouts):
    return constraints.OneOf(variable, tuple(constraints.RegisterLayout(layout) for layout in layouts))


def recorded(search, layouts):
    def run(unknowns, system, **options):
        solution, fuel = search(unknowns, system, **options)
        if not isinstance(solution, constraints.Unsatisfiable):
            layouts.append([solution[variable] for variable in unknowns])
        return solution, fuel

    return run


@pytest.mark.parametrize(
    "case", [case for case in KERNEL_SIZED if case.operation == "paged_decode"][:1], ids=lambda case: case.name
)
def test_a_kernel_gets_the_layouts_that_jax_gives_it(monkeypatch, case):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    args, kwargs = build(case)
    attend = functools.partial(getattr(jattn_kernels, case.operation), spec=kwargs.pop("spec"), implementation="mosaic")

    importlib.import_module("jattn_kernels.mosaic.entry")
    assert layout_inference.find_assignments_for is layout_search.find_assignments_for
    ours, jaxs = [], []
    for search, layouts in ((layout_search.find_assignments_for, ours), (layout_search._search, jaxs)):
        monkeypatch.setattr(layout_inference, "find_assignments_for", recorded(search, layouts))
        jax.clear_caches()
        jax.jit(attend).trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    assert len(ours[-1]) > 100
    assert ours[-1] == jaxs[-1]  # of all unknowns: what a search calls itself for was noted before


def test_each_group_has_layouts_of_its_own():
    found, _ = searched(
        constraints.Equals(A, B), constraints.Equals(C, D), either(A, TILED), either(D, SPLAT), either(E, TILED)
    )
    assert {variable.key.name: layout.value for variable, layout in found.items()} == {
        "a": TILED,
        "b": TILED,
        "c": SPLAT,
        "d": SPLAT,
        "e": TILED,
    }


def test_one_group_without_a_layout_is_enough():
    found, _ = searched(constraints.Equals(A, B), either(A, TILED), either(B, SPLAT), either(C, TILED))
    assert isinstance(found, constraints.Unsatisfiable)


def test_fuel_is_of_all_groups():
    given = [either(variable, TILED, SPLAT) for variable in (A, B, C, D, E)]
    _, left = searched(*given, fuel=5)
    assert left == 0
    with pytest.raises(ValueError, match="failed to find a solution"):
        searched(*given, fuel=4)


def test_equal_variables_are_found_along_chains_in_the_order_of_mention():
    system = constraints.ConstraintSystem(
        constraints=[constraints.Equals(C, B), constraints.Equals(D, E), constraints.Equals(A, B)]
    )
    assert layout_search.compute_transitively_equal_vars(system) == {C: [B, A], B: [C, A], D: [E], E: [D], A: [C, B]}


def test_what_two_systems_ask_for_is_what_jax_makes_of_it():
    tiled, splat = constraints.RegisterLayout(TILED), constraints.RegisterLayout(SPLAT)
    one = constraints.ConstraintSystem(assignments={A: tiled, B: splat}, constraints=[constraints.Equals(C, D)])
    others = [
        constraints.ConstraintSystem(assignments={B: splat, C: tiled}, constraints=[either(E, TILED)]),
        constraints.ConstraintSystem(assignments={A: splat}),
        constraints.ConstraintSystem(),
        constraints.Unsatisfiable(),
    ]
    for other in others:
        for left, right in ((one, other), (other, one)):
            if isinstance(left, constraints.ConstraintSystem):
                ours, jaxs = layout_search.both(left, right), layout_search._both(left, right)
                assert type(ours) is type(jaxs)
                assert str(ours) == str(jaxs) or isinstance(ours, constraints.Unsatisfiable)
    assert isinstance(one & others[1], constraints.Unsatisfiable)
