"""Devices that exchange in kernels run programs of their own: the text of one device, and the same bits on each."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import step_compilation
from jattn.checkpoint import Checkpoint
from jattn.compiled_steps import StepPlan
from jattn.device_mesh import made
from jattn.on_each import OnEach, StepOnEach, apart, each, first_of
from jattn.parallel import Parallel
from jattn.serving.executor.mesh_plans import of_one
from jattn.serving.steps.drafting import NgramDrafting
from jattn.serving.structured.params import StructuredOutputsParams
from jattn.step_cache import StepCache
from jattn.step_compilation import compile_steps
from tests.jattn.harness.exchange_by_host import exchanging_by_host
from tests.jattn.harness.several_devices import DRAWN, GREEDY, engine_of, texts, write_llama
from tests.jattn.harness.tiny import VOCAB, run
from tests.jattn.harness.tiny_grammars import END, grammar, text
from tests.models.harness.goldens import GOLDEN
from tests.often import slow

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(1, 60, length).tolist() for length in (1, 5, 23)]
RULED = dataclasses.replace(DRAWN, repetition_penalty=1.3, logprobs=3, prompt_logprobs=2)
TWO = Parallel("tensor", 2)


@pytest.fixture
def exchange():
    with exchanging_by_host(TWO) as exchange:
        yield exchange


@pytest.fixture
def llama(tmp_path):
    return Checkpoint(write_llama(tmp_path / "llama", vocab=VOCAB))


def assert_all_hold_the_same(engine):
    first, *others = map(jax.tree.leaves, engine.executor.state.parts)
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert one.devices() != same.devices()
            np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(same).view(np.uint8))


@pytest.mark.parametrize(
    ("changes", "params"),
    [
        ({"greedy_steps": True}, [GREEDY]),
        ({"full_sampling": True}, [GREEDY, RULED]),  # prompts are scored by a step of their own
        slow({"speculative": NgramDrafting(num_draft_tokens=3)}, [GREEDY]),
    ],
)
def test_devices_write_what_one_writes(llama, exchange, changes, params):
    engine = engine_of(llama, 2, **changes)
    assert {type(engine.executor.compiled_steps[key]) for key in engine.executor.compiled_steps.records} == {StepOnEach}
    assert engine.executor.memory_use().pool == sum(leaf.nbytes for leaf in jax.tree.leaves(engine.executor.pool)) // 2
    before = exchange.count
    written = texts(engine, PROMPTS, *params)
    assert exchange.count > before
    assert_all_hold_the_same(engine)
    assert written == texts(engine_of(llama, 1, **changes), PROMPTS, *params)


@pytest.mark.parametrize("case", ["glm4_moe", slow("olmoe"), slow("deepseek_v3")])
def test_experts_are_chosen_by_their_numbers_on_each_device(case):
    checkpoint = Checkpoint(GOLDEN / case)
    with exchanging_by_host(dataclasses.replace(TWO, by_expert=True)):
        engine = engine_of(checkpoint, 2, expert_parallel=True)
        written = texts(engine, PROMPTS, GREEDY)
    assert_all_hold_the_same(engine)
    assert written == texts(engine_of(checkpoint, 1), PROMPTS, GREEDY)


def test_a_grammar_is_followed_and_what_was_cut_short_starts_over(llama, exchange):
    params = StructuredOutputsParams(regex="[a-m]{3,8}[0-9]{5}")
    asked = dataclasses.replace(DRAWN, structured_outputs=params, ignore_eos=False, stop_token_ids=(END,))
    written = []
    for devices in (1, 2):
        engine = engine_of(llama, devices, structured_steps=True)
        request = engine.make_request(PROMPTS[2], asked, grammar=grammar(regex=params.regex))
        written += [run(engine, [request, engine.make_request(PROMPTS[1], DRAWN)])]
    assert written[1] == written[0]
    assert text([token for token in written[1][0] if token != END])
    cut = engine.make_request(PROMPTS[1], DRAWN)
    engine.add(cut)
    for _ in range(3):
        engine.step()
    engine.executor.restart()
    assert_all_hold_the_same(engine)


def number_and_sum(held, given):
    """What a device can tell of itself: its number, and what it has with what it is given."""
    return held + given, TWO.first_of(10) + jnp.zeros((), jnp.int32)


def plan():
    held = OnEach((jax.ShapeDtypeStruct((2,), jnp.float32),) * 2)
    return of_one(StepPlan(number_and_sum, (held, np.zeros(2, np.float32)), donate=(0,)), tuple(jax.devices()[:2]))


def check(step):
    shares = made(lambda: (jnp.arange(2) + TWO.first_of(2)).astype(jnp.float32), TWO, shares=True)
    held = apart(shares, jax.devices()[:2])
    del shares
    sums, numbers = step(held, np.full(2, 0.5, np.float32))
    assert [part.devices() for part in sums.parts] == [{device} for device in jax.devices()[:2]]
    assert [np.asarray(part).tolist() for part in sums.parts] == [[0.5, 1.5], [2.5, 3.5]]
    assert list(map(int, numbers.parts)) == [0, 10]
    assert all(part.is_deleted() for part in held.parts)


def test_a_program_knows_its_number_and_consumes_what_is_donated(tmp_path, monkeypatch):
    """Compiled once for all devices; and the same from disk, where there is one file of it."""
    lowered, lower = [], step_compilation._lowered
    monkeypatch.setattr(step_compilation, "_lowered", lambda plan: lowered.append(plan) or lower(plan))
    monkeypatch.setattr(step_compilation, "step_cache", lambda: StepCache(tmp_path / "steps"))
    for _ in range(2):
        check(compile_steps({"step": plan()})["step"])
    assert len(lowered) == len(list((tmp_path / "steps").iterdir())) == 1


def test_what_fails_on_one_device_is_told_once_the_others_have_theirs():
    sent, waits = [], threading.Event()

    def failing(*arguments):
        raise RuntimeError("It has failed.")

    def slowly(*arguments):
        waits.wait(0.2)
        sent.append(arguments)

    for programs in ([failing, slowly], [slowly, failing]):
        sent.clear()
        with pytest.raises(RuntimeError, match="It has failed"):
            StepOnEach(programs, jax.devices()[:2])(OnEach((1, 2)), 3)
        (arguments,) = sent
        assert arguments[1] == 3


def test_what_is_not_apart_is_itself():
    assert apart(3, ()) == first_of(3) == each(lambda x: x + 1, 2) == 3
    assert each(lambda x: x + 1, OnEach((1, 2))) == OnEach((2, 3))
