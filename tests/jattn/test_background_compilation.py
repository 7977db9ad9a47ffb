"""An engine that serves while its smaller steps are compiled gives the same tokens, and tells of what fails."""

import dataclasses
import gc
import threading
import time
import types

import pytest

from jattn import step_compilation
from jattn.serving.engine import Engine
from jattn.serving.executor import background, executor
from jattn.serving.executor.step_plans import StepKey, in_order_of_need, largest_steps, step_keys
from jattn.serving.resolved_config import resolved
from jattn_kernels.call import Device
from tests.jattn.harness.tiny import CONFIG, one_variant, plans_of, run, sampled, tiny_model
from tests.often import slow

SMALLER = {StepKey("decode", 2, "plain"), StepKey("prefill", 8, "plain")}
SIZES = dataclasses.replace(
    CONFIG, smallest_decode_bucket=2, smallest_prefill_bucket=8, compile_in_background=True, enable_prefix_caching=False
)


@pytest.fixture
def held(monkeypatch):
    """Compiling in the background waits for this event; it takes the plans that it is given from `seen`."""
    gate, steps_in_turn = threading.Event(), background.steps_in_turn

    def when_let(plans, **options):
        assert gate.wait(60)
        yield from steps_in_turn(plans, **options)

    monkeypatch.setattr(background, "steps_in_turn", when_let)
    yield gate
    gate.set()


def serve(engine):
    return run(engine, [engine.make_request([3, 1, 4], sampled(seed=1, max_tokens=5))])


def test_larger_steps_serve_until_the_smaller_ones_are_there(held, monkeypatch):
    with one_variant("plain"):
        engine = Engine(tiny_model(), SIZES)
        executor, keys = engine.executor, []
        launch = executor._launch
        monkeypatch.setattr(executor, "_launch", lambda key, *rest: keys.append(key) or launch(key, *rest))
        assert executor.background.left == 2
        assert not any(key in executor.compiled_steps for key in SMALLER)
        before = serve(engine)
        assert {(key.kind, key.size) for key in keys} == {("prefill", 16), ("decode", 4)}
        held.set()
        assert executor.background.wait(120.0)
        assert all(key in executor.compiled_steps for key in SMALLER)
        keys.clear()
        assert serve(engine) == before
        assert set(keys) == SMALLER
        assert not executor.background.failed


@pytest.mark.parametrize(
    ("owner", "name"),
    [slow(step_compilation, "_lowered"), (step_compilation._Kept, "store")],
    ids=["lowering", "compiling"],
)
def test_step_that_cannot_be_compiled_is_told_and_done_without(monkeypatch, caplog, owner, name):
    function = getattr(owner, name)

    def failing(*arguments):
        if threading.current_thread().name.startswith(background.THREAD):
            raise RuntimeError("no room\nfor it")
        return function(*arguments)

    monkeypatch.setattr(owner, name, failing)
    with one_variant("plain"):
        engine = Engine(tiny_model(), SIZES)
        assert engine.executor.background.wait(60.0)
        assert engine.executor.background.failed == dict.fromkeys(SMALLER, "no room for it")
        assert "cannot be compiled; a larger one serves in its place" in caplog.text
        assert len(serve(engine)[0]) == 5


def test_engine_that_goes_stops_compiling(held):
    with one_variant("plain"):
        engine = Engine(tiny_model(), SIZES)
        compiling = engine.executor.background
        del engine
        gc.collect()
        held.set()
        assert not compiling.wait(60.0)
        assert compiling.left == 2  # none was under way


def test_interpreter_that_ends_waits_for_the_step_under_way(monkeypatch):
    at_exit = []
    monkeypatch.setattr(background, "atexit", types.SimpleNamespace(register=at_exit.append, unregister=at_exit.remove))
    begun, gate, store = threading.Event(), threading.Event(), step_compilation._Kept.store

    def when_let(*arguments):
        if threading.current_thread().name.startswith(background.THREAD):
            begun.set()
            assert gate.wait(60)
        store(*arguments)

    def let_when_told_to_stop(compiling):
        assert compiling._stopping.wait(60)
        time.sleep(0.2)
        gate.set()

    monkeypatch.setattr(step_compilation._Kept, "store", when_let)
    with one_variant("plain"):
        compiling = Engine(tiny_model(), SIZES).executor.background
        (end,) = at_exit
        assert begun.wait(60)
        threading.Thread(target=let_when_told_to_stop, args=(compiling,)).start()
        end()
    assert compiling.left == 1
    assert not at_exit


@pytest.mark.parametrize(
    ("asked", "platform", "at_once", "expected"),
    [
        (None, "gpu", 2, True),
        (None, "gpu", 16, False),
        (None, "cpu", 2, False),
        (True, "cpu", 16, True),
        (False, "gpu", 2, False),
    ],
)
def test_steps_are_left_to_the_background_where_they_would_wait_for_each_other(
    monkeypatch, asked, platform, at_once, expected
):
    config = resolved(dataclasses.replace(SIZES, compile_in_background=asked), tiny_model())
    monkeypatch.setattr(executor, "COMPILING_AT_ONCE", at_once)
    monkeypatch.setattr(executor, "default_device", lambda: Device(platform))
    assert len(step_keys(config)) == 13
    assert executor.compiles_in_background(config) == expected


def test_small_steps_without_rules_come_first():
    keys = [StepKey("decode", 8, "full"), StepKey("prefill", 64, "plain"), StepKey("decode", 8, "plain")]
    assert in_order_of_need(keys) == [keys[2], keys[1], keys[0]]


def test_largest_steps_are_one_of_each_kind_and_variant():
    keys = plans_of(dataclasses.replace(CONFIG, prefill_tokens=2048, max_num_seqs=32)).executor.compiled_steps
    assert largest_steps(keys) == {
        *(StepKey("decode", 32, variant) for variant in ("greedy", "plain", "full")),
        *(StepKey("prefill", 2048, variant) for variant in ("greedy", "plain", "full")),
        StepKey("note", 2048, "full"),
        StepKey("score", 256, "full"),
    }
