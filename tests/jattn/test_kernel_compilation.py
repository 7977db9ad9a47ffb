"""Mosaic's kernels of a step are found in its program, each once, and compiled beside it where that is worth it."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import pytest

from jattn import kernel_compilation, step_compilation
from jattn.compiled_steps import StepPlan
from jattn.kernel_compilation import MosaicKernel, kernels_beside, mosaic_kernels
from jattn.lowering import LoweringProcesses
from jattn.step_compilation import compile_steps

X = jax.ShapeDtypeStruct((8,), jnp.float32)


def calls(x, *, modules, told=None):
    """A program that calls a kernel for each of the modules, in a loop."""

    def body(_, x):
        for module in modules:
            attributes = {"kernel_hash": module[:1], "module": module, "use_custom_barrier": False} | (told or {})
            x = jax.ffi.ffi_call("mosaic_gpu_v2", X)(x, **attributes, skip_device_barrier=True)
        return x

    return jax.lax.fori_loop(0, 3, body, x)


def lowered(*modules, **options):
    step = jax.jit(functools.partial(calls, modules=modules, **options))
    return step.trace(X).lower(lowering_platforms=("cuda",))


@pytest.fixture
def compiled(monkeypatch):
    """Kernels that are compiled by themselves, with the threads that do it."""
    found = []
    monkeypatch.setattr(
        kernel_compilation,
        "compile_alone",
        lambda kernel, device: found.append((kernel, device, threading.get_ident())),
    )
    return found


def test_each_kernel_of_a_program_is_found_once():
    """As bytes, which need not be a text."""
    kernels = mosaic_kernels(lowered(b"a\xff\x00", b"b", b"a\xff\x00"))
    assert kernels == [MosaicKernel(b"a", b"a\xff\x00", False), MosaicKernel(b"b", b"b", False)]


def test_other_calls_are_no_kernels():
    step = jax.jit(lambda x: jax.ffi.ffi_call("other", X)(x) + 1)
    assert mosaic_kernels(step.trace(X).lower(lowering_platforms=("cuda",))) == []


def test_kernels_are_compiled_in_threads_that_are_waited_for(compiled):
    with kernels_beside(lowered(b"a", b"b"), jax.devices()[0]):
        pass
    assert sorted(kernel.module for kernel, _, _ in compiled) == [b"a", b"b"]
    assert {device for _, device, _ in compiled} == {jax.devices()[0]}
    assert threading.get_ident() not in {thread for _, _, thread in compiled}


def test_a_kernel_that_cannot_be_compiled_is_left_to_the_step():
    """A CPU knows no such call."""
    entered = False
    with kernels_beside(lowered(b"a"), jax.devices()[0]):
        entered = True
    assert entered
    with pytest.raises(Exception, match="mosaic_gpu_v2"):
        kernel_compilation.compile_alone(MosaicKernel(b"a", b"a", False), jax.devices()[0])


def test_calls_that_look_otherwise_are_left_to_the_step(compiled):
    """Attributes of another version of JAX."""
    unlike = lowered(b"a", told={"use_custom_barrier": 1.5})
    with pytest.raises(ValueError, match="BoolAttr"):
        mosaic_kernels(unlike)
    with kernels_beside(unlike, jax.devices()[0]):
        pass
    assert compiled == []


def doubled(x):
    return 2 * x


@pytest.fixture
def beside(monkeypatch):
    """The steps that kernels are compiled beside, by the device of each."""
    steps = []

    def noted(lowered, device):
        steps.append(device)
        return kernels_beside(lowered, device)

    monkeypatch.setattr(step_compilation, "kernels_beside", noted)
    return steps


@pytest.mark.parametrize(("cores", "num_steps", "num_beside"), [(16, 1, 1), (16, 4, 4), (16, 5, 0), (2, 1, 0)])
def test_kernels_are_compiled_beside_few_steps_on_many_cores(
    no_cache, monkeypatch, beside, cores, num_steps, num_beside
):
    monkeypatch.setattr(step_compilation, "COMPILING_AT_ONCE", cores)
    plans: dict[Hashable, StepPlan] = {size: StepPlan(doubled, (jnp.zeros(size + 1),)) for size in range(num_steps)}
    steps = compile_steps(plans, processes=LoweringProcesses(0))
    assert steps(0, jnp.ones(1)).tolist() == [2]
    assert beside == num_beside * jax.devices()[:1]


def test_no_kernel_becomes_a_program_in_jaxs_own_cache(no_cache, monkeypatch, beside, tmp_path):
    """Which is used for steps that have no name."""
    monkeypatch.setattr(step_compilation, "COMPILING_AT_ONCE", 16)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    processes = LoweringProcesses(0)
    compile_steps({"named": StepPlan(doubled, (jnp.zeros(3),))}, processes=processes)
    assert len(beside) == 1
    compile_steps({"nameless": StepPlan(lambda x: 3 * x, (jnp.zeros(3),))}, processes=processes)
    assert len(beside) == 1


def test_no_kernel_is_compiled_by_itself_in_one_of_several_processes(no_cache, monkeypatch, beside):
    monkeypatch.setattr(step_compilation, "COMPILING_AT_ONCE", 16)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    compile_steps({"step": StepPlan(doubled, (jnp.zeros(3),))}, processes=LoweringProcesses(0))
    assert beside == []


@pytest.fixture
def no_cache():
    """JAX has no cache folder; an LLM of a test before may have set one."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the wheels of jax[cuda13]")
def test_a_step_finds_its_kernel_compiled(tmp_path):
    """For an H200, on a machine without one."""
    told = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    told |= {"MOSAIC_GPU_DUMP_TO": str(tmp_path), "MOSAIC_GPU_DUMP_PTX": "1"}
    command = [sys.executable, "-m", "tests.jattn.harness.kernel_of_a_step", str(tmp_path)]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"kernels": 1, "made alone": 1, "made again for the step": 0, "made for another step": 1}
