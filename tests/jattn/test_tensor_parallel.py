"""A model shared by several devices, which are parts of the CPU here: the text is that of one device."""

import dataclasses
import re
from importlib.metadata import entry_points
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jattn
from jattn.checkpoint import Checkpoint
from jattn.compiled_steps import CompiledSteps
from jattn.device_mesh import OnAll, made
from jattn.mailbox import Mailbox
from jattn.model import load_model, model_class
from jattn.parallel import Parallel
from jattn.serving.engine import Engine
from jattn.serving.executor.step_plans import StepKey
from jattn.serving.resolved_config import parallel_of
from jattn.serving.steps.draft_model import DraftModel
from jattn.serving.steps.drafting import NgramDrafting
from jattn.serving.structured.params import StructuredOutputsParams
from jattn_kernels.call import Device
from jattn_kernels.inbox import FAILED
from tests.jattn.harness.several_devices import (
    CONFIG,
    DRAWN,
    GREEDY,
    assert_all_hold_the_same,
    engine_of,
    exchanges,
    texts,
    unordered_exchanges,
    write_llama,
)
from tests.jattn.harness.tiny import VOCAB, plans_of, run
from tests.jattn.harness.tiny_grammars import END, grammar, text
from tests.models.harness.goldens import GOLDEN, OTHER_CASES
from tests.often import slow

RNG = np.random.default_rng(1)
BEGINNING = RNG.integers(1, 60, 14).tolist()
PROMPTS = [RNG.integers(1, 60, length).tolist() for length in (1, 5, 23)] + [[*BEGINNING, 7], [*BEGINNING, 9, 3]]
DRAFTING = {"speculative": NgramDrafting(num_draft_tokens=3)}
RULED = dataclasses.replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.5, logprobs=3, prompt_logprobs=2)
MIXTURES = ("mixtral", "llama4", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Checkpoint(write_llama(tmp_path_factory.mktemp("checkpoints") / "llama"))


@pytest.fixture(scope="module")
def on_one(llama):
    return texts(engine_of(llama, 1), PROMPTS, GREEDY, DRAWN)


@pytest.fixture(scope="module")
def two(llama):
    return engine_of(llama, 2, greedy_steps=True)


@pytest.mark.parametrize("devices", [2, *(slow(number) for number in (4, 8))])
def test_several_devices_write_what_one_writes(llama, on_one, two, devices):
    """More requests than rows, prompts in chunks, and a beginning that two share; eight devices, two heads of keys."""
    engine = two if devices == 2 else engine_of(llama, devices)
    assert texts(engine, PROMPTS, GREEDY) + texts(engine, PROMPTS, DRAWN) == on_one
    assert_all_hold_the_same(engine)
    request = engine.make_request(PROMPTS[-1], GREEDY)
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert request.num_cached_tokens == 12
    assert request.generated == on_one[len(PROMPTS) - 1]


def test_where_nobody_draws_no_logits_go_between_devices(two):
    for variant, gathered in (("greedy", "s32[2,2,4]"), ("plain", "f32[4,96]")):
        program = two.executor.compiled_steps[StepKey("decode", 4, variant)].as_text()
        assert [line.split()[2].partition("{")[0] for line in program.splitlines() if " all-gather(" in line] == [
            gathered
        ]


@pytest.mark.parametrize(("case", "by_expert"), [("olmoe", False), slow("glm4_moe", False), ("glm4_moe", True)])
def test_each_exchange_waits_for_the_one_before_it(case, by_expert):
    """Two that do not could run at once, and take each other's parts: norms of queries and keys, a shared expert."""
    config = dataclasses.replace(CONFIG, tensor_parallel=2, expert_parallel=by_expert, greedy_steps=True)
    model = load_model(Checkpoint(GOLDEN / case), dtype=jnp.float32, parallel=parallel_of(config))
    plan = plans_of(config, model).executor.compiled_steps[StepKey("decode", 4, "greedy")]
    program = jax.make_jaxpr(plan.function)(*plan.arguments).jaxpr
    assert exchanges(program)
    assert not unordered_exchanges(program)


def test_exchanges_that_do_not_wait_are_found():
    parallel = Parallel("tensor", 2)

    def twice(x):
        return parallel.all_reduce(x) + parallel.all_reduce(2 * x)

    def sum_and_gather(x):
        return parallel.all_reduce(x).sum() + parallel.gather_logits(2 * x[None]).sum()

    for function in (twice, sum_and_gather):
        step = OnAll(function, parallel, takes_shares=(True,), gives_shares=False)
        assert len(unordered_exchanges(jax.make_jaxpr(step)(jnp.ones(4)).jaxpr)) == 1


def test_what_was_cut_short_starts_over_on_all_devices(two, on_one, monkeypatch):
    request = two.make_request(PROMPTS[2], GREEDY)
    two.add(request)
    two.step()
    with monkeypatch.context() as patch:
        patch.setattr(two.executor, "read", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            two.step()
    run(two)
    assert request.generated == on_one[2]
    assert_all_hold_the_same(two)


def test_each_device_has_its_share_and_no_more(llama):
    parallel = Parallel("tensor", 2)
    model = load_model(llama, dtype=jnp.float32, parallel=parallel)
    make = model_class(llama.architecture).from_checkpoint
    for number, device in enumerate(jax.local_devices()[:2]):
        expected = jax.tree.leaves(make(llama, dtype=jnp.float32, parallel=parallel, rank=number))
        for leaf, share in zip(jax.tree.leaves(model), expected, strict=True):
            assert leaf.sharding.spec == PartitionSpec("tensor")
            assert len(leaf.addressable_shards) == 2
            (own,) = (shard.data for shard in leaf.addressable_shards if shard.device == device)
            np.testing.assert_array_equal(own, share)


def test_memory_is_that_of_one_device(two):
    shards = [shard for leaf in jax.tree.leaves(two.executor.pool) for shard in leaf.addressable_shards]
    assert two.executor.memory_use().pool == sum(shard.data.nbytes for shard in shards) // 2


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"tensor_parallel": 0}, "`tensor_parallel` must be a whole number of at least 1. Got 0"),
        ({"tensor_parallel": 9}, "`tensor_parallel` must be at most the number of devices that JAX has here, 8. Got 9"),
        ({"tensor_parallel": 3}, "`num_attention_heads` must divide by the number of devices. Got 8 over 3 devices"),
    ],
)
def test_what_devices_cannot_share_is_refused_before_a_weight_is_read(llama, monkeypatch, knobs, sentence):
    monkeypatch.setattr(Checkpoint, "read", None)
    for name in ("Tokenizer", "ChatTemplate"):
        monkeypatch.setattr(f"jattn.serving.frontend.llm.{name}", lambda _: None)
    with pytest.raises(ValueError, match=sentence):
        jattn.LLM(llama.path, **knobs)


@pytest.mark.parametrize(("loaded", "served"), [(1, 2), (2, 1)])
def test_a_model_that_other_devices_share_is_refused(llama, loaded, served):
    parallel = Parallel("tensor", 2) if loaded == 2 else Parallel()
    model = load_model(llama, dtype=jnp.float32, parallel=parallel)
    with pytest.raises(ValueError, match=f"`tensor_parallel` must be the number .* {loaded}. Got {served}"):
        Engine(model, dataclasses.replace(CONFIG, tensor_parallel=served))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gqa", "tied", *OTHER_CASES])
def test_every_family_writes_on_several_devices_what_it_writes_on_one(case):
    checkpoint = Checkpoint(GOLDEN / case)
    expected = texts(engine_of(checkpoint, 1), PROMPTS, GREEDY, DRAWN)
    for devices, by_expert in ((2, False), (4, False), (2, True))[: 3 if case in MIXTURES else 2]:
        engine = engine_of(checkpoint, devices, expert_parallel=by_expert)
        assert texts(engine, PROMPTS, GREEDY, DRAWN) == expected
        assert_all_hold_the_same(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel": 4},
        {"kv_cache_dtype": "fp8_e4m3"},
        DRAFTING,
        {"speculative": DraftModel(num_layers=1, num_draft_tokens=3)},
        {"full_sampling": True, "greedy_steps": True},
        {"greedy_steps": True, **DRAFTING},
        {"mixed_steps": False},
        {"num_pages": 13},
        {"backend": "flashinfer"},
        {"backend": "flash_attention"},
        {"debug_checks": True},
        {"tensor_parallel": 4, "kv_cache_dtype": "fp8_e4m3", "num_pages": 25, "full_sampling": True, **DRAFTING},
        {"compile_in_background": True, "smallest_prefill_bucket": 4, "smallest_decode_bucket": 1},
    ],
    ids=str,
)
def test_whatever_an_engine_does_several_devices_do(llama, changes):
    changes = dict(changes)
    devices = changes.pop("tensor_parallel", 2)
    asked = (GREEDY, DRAWN, RULED) if changes.get("full_sampling") else (GREEDY, DRAWN)
    expected = texts(engine_of(llama, 1, **changes), PROMPTS, *asked)
    engine = engine_of(llama, devices, **changes)
    assert texts(engine, PROMPTS, *asked) == expected
    engine.executor.background.wait()
    assert_all_hold_the_same(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("decode", 4), ("prefill", 16)])
def test_kernels_of_a_hopper_gpu_are_lowered_on_several(tmp_path, monkeypatch, kind, size):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    sizes = {"kv_heads": 4, "head_dim": 128, "hidden": 1024, "units": 512, "vocab": 512, "layers": 1}
    checkpoint = Checkpoint(write_llama(tmp_path / "llama", **sizes))
    changes = {"tensor_parallel": 2, "dtype": "bfloat16", "page_size": 16, "implementation": "mosaic"}
    changes |= {"greedy_steps": True}  # what draws is a kernel of Triton's, which is interpreted here
    config = dataclasses.replace(CONFIG, **changes)
    model = load_model(checkpoint, dtype=jnp.bfloat16, parallel=parallel_of(config))
    plan = plans_of(config, model).executor.compiled_steps[StepKey(kind, size, "greedy")]
    traced = jax.jit(plan.function, donate_argnums=plan.donate).trace(*plan.arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu" in text
    assert text.count("stablehlo.all_reduce") == 3  # the embedding, behind attention, behind the MLP


@pytest.mark.slow
def test_grammars_are_followed_on_several_devices(tmp_path):
    """Forward pass and choice of tokens apart; beside them a request without a grammar."""
    checkpoint = Checkpoint(write_llama(tmp_path / "llama", vocab=VOCAB))
    asked = StructuredOutputsParams(regex="[a-m]{3,8}[0-9]{5}")
    written = []
    for devices in (1, 4):
        engine = engine_of(checkpoint, devices, structured_steps=True)
        params = dataclasses.replace(DRAWN, structured_outputs=asked, ignore_eos=False, stop_token_ids=(END,))
        requests = [engine.make_request(PROMPTS[2], params, grammar=grammar(regex=asked.regex))]
        written.append(run(engine, [*requests, engine.make_request(PROMPTS[1], DRAWN)]))
    assert re.fullmatch("[a-m]{3,8}[0-9]{5}", text([token for token in written[0][0] if token != END]))
    assert written[1] == written[0]


@pytest.mark.slow
def test_a_checkpoint_becomes_the_same_text_on_several_devices():
    """One that was trained, in whatever steps a server would take."""
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    prompts = ["import os\nimport sys\n\n\nclass Parser:\n    def __init__(self", "def read_lines(path):\n"]
    params = [jattn.SamplingParams(max_tokens=64, temperature=t, seed=1, logprobs=2) for t in (0.0, 0.8)]
    written = []
    for devices in (1, 2, 4):
        knobs = {"dtype": "float32", "max_num_seqs": 4, "max_context_len": 128, "tensor_parallel": devices}
        outputs = jattn.LLM(point.load()(), **knobs).generate(prompts, params)
        written.append([output.outputs[0].text for output in outputs])
    assert written[1:] == written[:1] * 2


@pytest.fixture
def fake_mailbox(monkeypatch):
    """One that devices of a CPU do not exchange by: an engine keeps it as it would that of GPUs."""
    parallel = Parallel("tensor", 2)
    words = made(lambda: jnp.zeros(parallel.inbox.words, jnp.uint32), parallel, shares=True)
    table = made(lambda: jnp.zeros(6, jnp.uint32), parallel, shares=True)
    mailbox = Mailbox(parallel.inbox, words, table, table)
    monkeypatch.setattr("jattn.serving.executor.executor.mailbox_of", lambda _: mailbox)
    return mailbox


def test_steps_run_twice_on_an_empty_batch_before_devices_wait_for_each_other(llama, on_one, fake_mailbox, monkeypatch):
    calls = []
    monkeypatch.setattr(CompiledSteps, "__call__", lambda steps, key, *args: calls.append(key) or steps[key](*args))
    engine = engine_of(llama, 2, structured_steps=True)
    keys = [key for key in engine.executor.compiled_steps.records if key.kind != "note"]
    assert {"decode", "forward_prefill", "sample_decode"} <= {key.kind for key in keys}
    assert sorted(calls) == sorted(2 * keys)
    assert texts(engine, PROMPTS, GREEDY) + texts(engine, PROMPTS, DRAWN) == on_one


@pytest.mark.parametrize("by_another", [slow(False), True])
def test_a_device_that_waited_in_vain_starts_the_engine_over(llama, on_one, fake_mailbox, monkeypatch, by_another):
    """What it computed since is NaN; the mailbox is emptied before anything runs again, if not by another engine."""
    engine = engine_of(llama, 2)
    request = engine.make_request(PROMPTS[2], GREEDY)
    engine.add(request)
    for _ in range(3):
        engine.step()
    weights, broken = engine.executor.weights, jax.tree.map(lambda leaf: leaf * jnp.nan, engine.executor.weights)
    empty = fake_mailbox.empty

    def mended():
        empty()
        engine.executor.weights = weights

    monkeypatch.setattr(fake_mailbox, "empty", mended)
    engine.executor.weights, before = broken, fake_mailbox.words
    fake_mailbox.words = before.at[FAILED].set(1)
    sentence = "Device 0 of 2 that share the model waited some seconds for another one"
    if by_another:
        empty()
        sentence = "another engine on them has begun anew since"
    with pytest.raises(RuntimeError, match=sentence):
        run(engine)
    run(engine)
    assert fake_mailbox.waited_in_vain() == []
    assert request.generated == on_one[2]
