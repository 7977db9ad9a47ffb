"""Kernels are lowered without what JAX's lowering repeats, and are otherwise those that JAX lowers."""

import collections
import functools
import importlib
from typing import Any

import jax
import jax.experimental.mosaic.gpu.core as mosaic_core
import pytest
from jax.extend.mlir import ir

import jattn_kernels
from jattn_kernels.call import Device
from jattn_kernels.mosaic import repeated_operations
from tests.kernels.harness.case_table import build
from tests.kernels.harness.kernel_sized_cases import KERNEL_SIZED

CASE = next(case for case in KERNEL_SIZED if case.operation == "paged_decode")
# What a kernel does, which may not be merged: copies, products, barriers, stores.
EFFECTS = ("nvvm.", "llvm.inline_asm", "memref.store", "vector.store", "llvm.store")


def lowered(lower) -> list[collections.Counter[str]]:
    """The operations of each kernel that a decode lowers to, by their names."""
    kernels = []

    def noted(module: ir.Module, *args: Any, **kwargs: Any) -> None:
        lower(module, *args, **kwargs)
        names: collections.Counter[str] = collections.Counter()

        def count(operation: ir.Operation) -> ir.WalkResult:
            names[operation.name] += 1
            return ir.WalkResult.ADVANCE

        module.operation.walk(count)
        kernels.append(names)

    args, kwargs = build(CASE)
    attend = functools.partial(getattr(jattn_kernels, CASE.operation), spec=kwargs.pop("spec"), implementation="mosaic")
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
        patch.setattr(mosaic_core, "lower_mgpu_module", noted)
        jax.jit(attend).trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    return kernels


def test_whoever_imports_the_kernels_lowers_so():
    importlib.import_module("jattn_kernels.mosaic.entry")
    assert mosaic_core.lower_mgpu_module is repeated_operations.lower_mgpu_module


@pytest.fixture(scope="module")
def ours():
    return lowered(repeated_operations.lower_mgpu_module)


@pytest.fixture(scope="module")
def jaxs():
    return lowered(repeated_operations._lower)


def test_less_than_two_thirds_of_a_kernels_operations_are_left(ours, jaxs):
    assert len(ours) == len(jaxs) >= 1
    assert 3 * sum(ours[0].values()) < 2 * sum(jaxs[0].values())


def test_constants_are_made_less_often_and_effects_as_often_as_by_jax(ours, jaxs):
    for own, by_jax in zip(ours, jaxs, strict=True):
        assert own["arith.constant"] < by_jax["arith.constant"]
        effects = [name for name in by_jax if name.startswith(EFFECTS) and "sreg" not in name]
        assert effects
        assert {name: own[name] for name in effects} == {name: by_jax[name] for name in effects}
