"""Mosaic's kernels are compiled as soon as they are lowered, each once, and where that is worth it."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import core

from jattn import kernel_compilation, step_compilation
from jattn.compiled_steps import StepPlan
from jattn.kernel_compilation import compile_alone, kernels_beside
from jattn.lowering import LoweringProcesses
from jattn.step_compilation import compile_steps
from jattn_kernels import rms_norm
from jattn_kernels.call import Device


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Kernels are lowered for one, and none is known yet."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    monkeypatch.setattr(core, "KNOWN_KERNELS", {})
    jax.clear_caches()


def lower_kernel(rows):
    """Of as many rows as no other."""
    x, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 1024), (1024,)))
    step = jax.jit(lambda x, scale: rms_norm(x, scale, eps=1e-6, implementation="mosaic"))
    return step.trace(x, scale).lower(lowering_platforms=("cuda",))


@pytest.fixture
def compiled(monkeypatch):
    """Kernels that are compiled by themselves, with the device and the thread of each."""
    found = []
    monkeypatch.setattr(
        kernel_compilation,
        "compile_alone",
        lambda kernel_hash, module, device: found.append((kernel_hash, module, device, threading.get_ident())),
    )
    return found


def test_each_kernel_is_compiled_once_with_what_its_step_calls_it_by(compiled):
    with kernels_beside(jax.devices()[0]):
        lowered = [lower_kernel(rows) for rows in (8, 16)]
    assert len(compiled) == 2
    for kernel_hash, module, device, thread in compiled:
        assert core.KNOWN_KERNELS[kernel_hash] == module
        assert device is jax.devices()[0]
        assert thread != threading.get_ident()
    texts = [step.as_text("stablehlo") for step in lowered]
    assert all("mosaic_gpu_v2" in text and "use_custom_barrier = false" in text for text in texts)


def test_a_kernel_is_begun_while_others_are_lowered(monkeypatch):
    begun = threading.Event()
    monkeypatch.setattr(kernel_compilation, "compile_alone", lambda *_: begun.set())
    with kernels_beside(jax.devices()[0]):
        lower_kernel(8)
        assert begun.wait(60)


def test_all_are_compiled_when_it_ends_and_none_is_later(compiled):
    with kernels_beside(jax.devices()[0]):
        lower_kernel(8)
    lower_kernel(16)
    assert len(compiled) == 1


def test_several_may_ask_for_it_at_once(compiled):
    with kernels_beside("outer"), ThreadPoolExecutor(1) as pool:
        with kernels_beside("inner"):
            lower_kernel(8)
        pool.submit(lower_kernel, 16).result()
    assert sorted(device for _, _, device, _ in compiled) == ["inner", "outer", "outer"]


def test_a_jax_without_that_register_compiles_as_it_would(compiled, monkeypatch):
    monkeypatch.delattr(core, "KNOWN_KERNELS")
    with kernels_beside(jax.devices()[0]):
        monkeypatch.setattr(core, "KNOWN_KERNELS", {}, raising=False)
        lower_kernel(8)
    assert compiled == []


def test_a_kernel_that_cannot_be_compiled_is_left_to_the_step():
    """A CPU knows no such call."""
    with kernels_beside(jax.devices()[0]):
        lower_kernel(8)
    ((kernel_hash, module),) = core.KNOWN_KERNELS.items()
    with pytest.raises(Exception, match="mosaic_gpu_v2"):
        compile_alone(kernel_hash, module, jax.devices()[0])


def doubled(x):
    return 2 * x


@pytest.fixture
def beside(monkeypatch):
    """Each time that kernels are compiled beside steps, the device."""
    steps = []

    def noted(device):
        steps.append(device)
        return kernels_beside(device)

    monkeypatch.setattr(step_compilation, "kernels_beside", noted)
    return steps


@pytest.mark.parametrize(
    ("cores", "num_steps", "is_beside"), [(16, 1, True), (16, 4, True), (16, 5, False), (2, 1, False)]
)
def test_kernels_are_compiled_beside_few_steps_on_many_cores(
    no_cache, monkeypatch, beside, cores, num_steps, is_beside
):
    monkeypatch.setattr(step_compilation, "COMPILING_AT_ONCE", cores)
    plans: dict[Hashable, StepPlan] = {size: StepPlan(doubled, (jnp.zeros(size + 1),)) for size in range(num_steps)}
    steps = compile_steps(plans, processes=LoweringProcesses(0))
    assert steps(0, jnp.ones(1)).tolist() == [2]
    assert beside == is_beside * jax.devices()[:1]


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
