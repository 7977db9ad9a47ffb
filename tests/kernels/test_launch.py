"""Every launch of a Mosaic kernel has buffers of its own: one barrier before it and one behind it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jattn_kernels import mosaic
from jattn_kernels.mosaic.sm90.common import launch

X = jax.ShapeDtypeStruct((128,), jnp.float32)


def traced(run, *shapes):
    return jax.make_jaxpr(run)(*shapes).eqns


def barriers(equations):
    return [eqn for eqn in equations if eqn.primitive.name == "optimization_barrier"]


def test_a_launch_reads_all_arrays_behind_one_barrier_and_gives_results_behind_another():
    def add(x_ref, y_ref, sum_ref, difference_ref):
        sum_ref[...] = x_ref[...] + y_ref[...]
        difference_ref[...] = x_ref[...] - y_ref[...]

    equations = traced(launch.kernel(add, out_type=[X, X]), X, X)
    before, behind = barriers(equations)
    (start,) = [eqn for eqn in equations if before.outvars[0] in eqn.invars]
    assert len(before.invars) == 2
    assert set(before.outvars) <= set(start.invars)
    assert behind.invars == start.outvars


def test_refs_that_a_kernel_writes_into_are_behind_no_barrier_until_they_are_frozen():
    def add(x_ref, written_ref):
        written_ref[...] += x_ref[...]

    def run(x, y):
        ref = jax.new_ref(y)
        launch.kernel(add)(x, ref)
        return launch.frozen(ref)

    before, behind = barriers(traced(run, X, X))
    assert [len(before.invars), len(behind.invars)] == [1, 1]
    assert before.invars[0].aval.shape == X.shape


@pytest.mark.parametrize("options", [{}, {"auto_barriers": True}, {"auto_barriers": False}])
def test_only_a_kernel_that_says_so_goes_without_barriers_around_its_stores(monkeypatch, options):
    made = []
    monkeypatch.setattr(launch.plgpu, "kernel", lambda body, **facts: made.append(facts["compiler_params"]))
    launch.kernel(lambda: None, **options)
    (params,) = made
    assert params.unsafe_no_auto_barriers != options.get("auto_barriers", True)


def test_no_kernel_is_launched_past_it():
    files = Path(mosaic.__file__).parent.rglob("*.py")
    assert [file.name for file in files if "plgpu.kernel(" in file.read_text()] == ["launch.py"]
