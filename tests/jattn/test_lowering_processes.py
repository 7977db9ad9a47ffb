"""Steps traced and lowered in processes of their own are those that this one would have lowered."""

import gc
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import lowering
from jattn.compiled_steps import StepPlan
from jattn.lowering import LoweringProcesses, processes_for, without_collection
from jattn.step_compilation import compile_steps
from jattn_kernels.call import Device, assume_device
from jattn_kernels.dispatch import implementations, register
from tests.jattn.harness import steps_elsewhere

X = jax.ShapeDtypeStruct((2, 2), jnp.float32)


@pytest.fixture(scope="module")
def one():
    processes = LoweringProcesses(1)
    yield processes
    processes.close()


def text_of(function, *arguments):
    return jax.jit(function).lower(*arguments).as_text()


def test_compiled_steps_are_those_of_this_process(one):
    held, by = {"held": jnp.ones(3)}, jnp.full(3, 2.0)
    plans = {"step": StepPlan(steps_elsewhere.grown, (held, by), donate=(0,))}
    steps = compile_steps(plans, processes=one)
    after, given = steps("step", held, by)
    np.testing.assert_array_equal(after["held"], 3)
    np.testing.assert_array_equal(given, 2)
    assert held["held"].is_deleted()
    assert steps.records["step"].seconds > 0


@pytest.mark.parametrize(
    ("platform", "num_steps", "most", "count"),
    [("cpu", 34, 8, 0), ("gpu", 3, 8, 0), ("gpu", 4, 8, 4), ("gpu", 34, 8, 8), ("gpu", 34, 1, 1)],
)
def test_processes_are_begun_where_they_gain_time(monkeypatch, platform, num_steps, most, count):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assume_device(Device(platform, (9, 0) if platform == "gpu" else None))
    try:
        assert processes_for(num_steps, most=most) == count
    finally:
        assume_device(None)


def test_it_is_another_process_that_traces(one):
    number = jax.jit(one.lowered(steps_elsewhere.number_of_its_process, (jnp.int32(0),)))(jnp.int32(0))
    assert number not in (0, os.getpid())


def test_it_traces_for_the_device_that_this_process_assumes():
    assume_device(Device("cpu", None, 7))
    try:
        processes = LoweringProcesses(1)
    finally:
        assume_device(None)
    try:
        assert jax.jit(processes.lowered(steps_elsewhere.sms_of_the_device, (jnp.int32(0),)))(jnp.int32(0)) == 7
    finally:
        processes.close()


def test_it_lowers_under_the_settings_of_the_thread_that_began():
    with jax.default_matmul_precision("highest"):
        processes = LoweringProcesses(1)
    try:
        assert "HIGHEST" in text_of(processes.lowered(steps_elsewhere.product, (X,)), X)
        assert "HIGHEST" not in text_of(steps_elsewhere.product, X)
    finally:
        processes.close()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * 2, "pickle"),
        (steps_elsewhere.failing, "RuntimeError: no such step"),
        (steps_elsewhere.ending, "Ran out of input"),
    ],
    ids=["lambda", "failing", "ending"],
)
def test_what_a_process_cannot_lower_is_lowered_here(one, function, reason, caplog):
    with caplog.at_level(logging.INFO, "jattn"):
        assert one.lowered(function, (X,)) is function
    assert reason in caplog.text
    assert one.lowered(steps_elsewhere.product, (X,)) is not steps_elsewhere.product  # it goes on


def test_what_a_step_prints_stands_in_nobodys_way(one):
    assert jax.jit(one.lowered(steps_elsewhere.printed, (jnp.int32(0),)))(jnp.int32(4)) == 8


def test_a_process_is_not_asked_for_implementations_that_it_lacks():
    with register(implementations()[-1].__class__(**{**vars(implementations()[-1]), "name": "of this test"})):
        processes = LoweringProcesses(1)
        try:
            assert processes.lowered(steps_elsewhere.product, (X,)) is steps_elsewhere.product
        finally:
            processes.close()


def test_steps_come_as_they_are_done_each_with_its_key(one):
    steps = {size: (steps_elsewhere.product, (jax.ShapeDtypeStruct((size, size), jnp.float32),)) for size in (2, 3)}
    found = {key: (function, seconds) for key, function, seconds in one.as_done(steps)}
    assert found.keys() == steps.keys()
    for size, (function, seconds) in found.items():
        np.testing.assert_array_equal(jax.jit(function)(jnp.eye(size)), np.eye(size))
        assert seconds > 0


@pytest.mark.parametrize("count", [0, 1])
def test_no_more_steps_come_once_processes_are_closed(count):
    processes = LoweringProcesses(count)
    steps = dict.fromkeys(range(3), (steps_elsewhere.product, (X,)))
    in_turn = processes.as_done(steps)
    assert next(in_turn)[0] == 0
    processes.close()
    assert not list(in_turn)


@pytest.mark.parametrize(
    ("capability", "call"),
    [((9, 0), "mosaic_gpu_v2"), pytest.param((8, 9), "triton_kernel_call_ffi", marks=pytest.mark.gpu)],
)
def test_kernels_of_a_gpu_are_lowered_without_one(capability, call, caplog):
    assume_device(Device("gpu", capability, 132))
    try:
        processes = LoweringProcesses(1)
        x, scale = jax.ShapeDtypeStruct((16, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
        with caplog.at_level(logging.INFO, logger="jattn"):
            function = processes.lowered(steps_elsewhere.normed, (x, scale))
        assert function is not steps_elsewhere.normed, caplog.text
        lowered = jax.jit(function).trace(x, scale).lower(lowering_platforms=("cuda",))
        assert call in lowered.as_text()
    finally:
        assume_device(None)
        processes.close()


def test_calls_of_triton_kernels_may_be_sent_by_the_name_that_they_have():
    triton = pytest.importorskip("jax_triton.triton_lib")  # each release of jax-triton may rename them
    assert triton.CUSTOM_CALL_TARGET_NAME in lowering._KERNELS


@pytest.mark.parametrize("is_on", [True, False])
def test_the_garbage_collector_is_afterwards_as_it_was(is_on):
    def fail():
        assert not gc.isenabled()
        raise KeyError

    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(KeyError), without_collection():
            fail()
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if before else gc.disable)()
