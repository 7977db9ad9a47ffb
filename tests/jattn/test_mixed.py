"""Prompts and decodes in one launch: the tokens of each request alone, whatever it shares launches with."""

import dataclasses
import functools
import random

import numpy as np
import pytest
from flax import nnx

from jattn.attention.paged import PagedAttentionBackend
from jattn.backend import AttentionLayer, BackendOptions
from jattn.flashinfer import FlashInferAttnBackend
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.executor import executor as executor_module
from jattn.serving.executor.mixing import mixed_rows
from jattn.serving.request import SamplingParams
from jattn.serving.steps.drafting import NgramDrafting
from jattn_kernels.call import Device
from tests.jattn.harness.compile_log import compilations
from tests.jattn.harness.tiny import CONFIG, VOCAB, all_variants, one_variant, run, tiny_model
from tests.often import slow

MIXED = dataclasses.replace(CONFIG, mixed_steps=True, prefill_seqs=2)


@functools.cache
def engine():
    """Tests share it, and leave it idle."""
    with all_variants():
        return Engine(tiny_model(), MIXED)


@pytest.fixture
def launches(monkeypatch):
    """Of each launch of the shared engine: the kind of step, the requests that decode, and the tokens of prompts."""
    submit, seen = engine().executor.submit, []

    def spied(plan):
        num_tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        seen.append(("prefill" if plan.chunks else "decode", len(plan.decoding), num_tokens))
        return submit(plan)

    monkeypatch.setattr(engine().executor, "submit", spied)
    return seen


def crowd(params, count, seed=0):
    """Requests with prompts of up to three launches, which ask for `params` in turn."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 45)).tolist() for _ in range(count)]
    return [engine().make_request(prompt, params[i % len(params)]) for i, prompt in enumerate(prompts)]


def logprobs_of(request):
    """Natural logarithms, tokens' and prompt's."""
    of_places = [*request.logprobs, *request.prompt_logprobs.values()]
    return [found.logprob for of_place in of_places for found in of_place.values()]


GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
DRAWN = SamplingParams(max_tokens=17, temperature=1.0, top_k=50, top_p=0.9, seed=3)
RULED = SamplingParams(
    max_tokens=14,
    temperature=0.8,
    seed=5,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    logit_bias={7: 1.0},
    logprobs=2,
    prompt_logprobs=1,
)


@pytest.mark.parametrize(
    "params", [slow((GREEDY,)), slow((GREEDY, DRAWN)), (RULED, GREEDY, DRAWN)], ids=["greedy", "plain", "full"]
)
def test_mixed_crowd_with_preemption_gives_each_request_its_tokens_alone(launches, params):
    requests = crowd(params, 12)
    together = run(engine(), requests)
    mixed = [num_tokens for kind, num_decodes, num_tokens in launches if kind == "prefill" and num_decodes]
    assert len(mixed) > 5
    assert any(request.num_preemptions for request in requests)
    assert any(len(request.prompt) > MIXED.prefill_tokens for request in requests)
    for request, tokens in zip(requests, together, strict=True):
        twin = engine().make_request(request.prompt, request.params)
        assert [tokens] == run(engine(), [twin])
        np.testing.assert_allclose(logprobs_of(request), logprobs_of(twin), atol=1e-4)


def test_launch_with_a_prompt_holds_all_decodes_within_its_budget(launches):
    first = [engine().make_request([i, i + 1], GREEDY) for i in range(2)]
    for request in first:
        engine().add(request)
    while not all(request.generated for request in first):
        engine().step()
    launches.clear()
    run(engine(), [engine().make_request(list(range(30)), SamplingParams(max_tokens=3))])
    assert launches[:3] == [("prefill", 2, 14), ("prefill", 2, 14), ("prefill", 2, 2)]
    assert {kind for kind, *_ in launches[3:]} == {"decode"}


def test_decode_over_many_keys_has_a_launch_of_its_own(launches, monkeypatch):
    monkeypatch.setattr(executor_module, "LONGEST_MIXED", 4)
    engine().reset_prefix_cache()
    request = engine().make_request([1, 2, 3], GREEDY)
    engine().add(request)
    while not request.generated:
        engine().step()
    launches.clear()
    run(engine(), [engine().make_request(list(range(40)), SamplingParams(max_tokens=1))])
    kinds = [(kind, num_decodes) for kind, num_decodes, _ in launches]
    assert kinds[0] == ("prefill", 1)  # few keys yet
    first = kinds.index(("decode", 1))
    assert ("prefill", 0) in kinds[first:]
    assert ("prefill", 1) not in kinds[first:]


def test_no_compilation_in_200_steps_of_mixed_traffic(launches):
    rng, shared = random.Random(0), engine()
    with compilations() as events:
        for _ in range(200):
            if rng.random() < 0.2:
                shared.add(crowd([rng.choice([GREEDY, DRAWN, RULED])], 1, seed=rng.randrange(99))[0])
            shared.step()
        run(shared)
    assert events == []
    assert sum(kind == "prefill" and num_decodes > 0 for kind, num_decodes, _ in launches) > 30


@pytest.mark.slow  # test_surfaces holds its mixed batches against the oracle
def test_flashinfers_surface_serves_the_same_text_mixed():
    with one_variant("plain"):
        other = Engine(tiny_model(), dataclasses.replace(MIXED, backend="flashinfer", full_sampling=False))
        requests = crowd([GREEDY, DRAWN], 8, seed=4)
        expected = run(engine(), requests)
        assert run(other, [other.make_request(request.prompt, request.params) for request in requests]) == expected


def test_row_that_ends_is_inert_in_the_launch_that_was_planned_with_it(launches):
    prompt, (probe,) = list(range(50, 90)), run(engine(), [engine().make_request([1, 2, 3], GREEDY)])
    (expected,) = run(engine(), [engine().make_request(prompt, DRAWN)])
    assert probe.index(probe[4]) == 4
    engine().reset_prefix_cache()
    ends = engine().make_request([1, 2, 3], dataclasses.replace(GREEDY, stop_token_ids=(probe[4],)))
    engine().add(ends)
    while len(ends.generated) < 2:
        engine().step()
    row = ends.row
    launches.clear()
    assert run(engine(), [engine().make_request(prompt, DRAWN)]) == [expected]
    assert ends.generated == probe[:5]
    assert engine().executor.state.seq_lens[row] == 3 + 4  # the last token has no key
    # The second one gives the stop token, which the host has read before the fourth.
    assert launches[:4] == [("prefill", 1, 15), ("prefill", 1, 15), ("prefill", 1, 10), ("decode", 1, 0)]


def test_abort_and_interrupt_of_mixed_launches_lose_no_request(launches, monkeypatch):
    shared = engine()
    requests, steps = crowd([DRAWN, GREEDY], 8, seed=2), shared.executor.compiled_steps
    expected = [run(shared, [shared.make_request(request.prompt, request.params)])[0] for request in requests]

    def cut_short(*arguments):
        results = steps(*arguments)
        if launches[-1][0] == "prefill" and launches[-1][1] == 2:
            monkeypatch.setattr(shared.executor, "compiled_steps", steps)
            raise KeyboardInterrupt
        return results

    launches.clear()
    for request in requests:
        shared.add(request)
    while not any(request.generated for request in requests):
        shared.step()
    decoding = next(request for request in requests if request.generated)
    monkeypatch.setattr(shared.executor, "config", dataclasses.replace(shared.config, debug_checks=True))
    shared.abort(decoding)
    assert decoding.pages == []
    monkeypatch.setattr(shared.executor, "compiled_steps", cut_short)
    with pytest.raises(KeyboardInterrupt):
        run(shared)
    run(shared)
    for request, tokens in zip(requests, expected, strict=True):
        assert request.generated == (tokens[: len(request.generated)] if request is decoding else tokens)


def test_logits_that_are_not_finite_end_their_row_amid_prompts(launches, monkeypatch):
    """A token whose embedding is NaN comes in a prompt, in a launch in which a neighbour decodes."""
    shared = engine()
    neighbour, prompt = [1, 2, 3], [400, 401, 402]
    (expected,) = run(shared, [shared.make_request(neighbour, DRAWN)])
    weights = nnx.clone(shared.executor.weights)
    embedding = weights.vocabulary.embedding
    embedding[...] = embedding[...].at[401].set(np.nan)
    assert 401 not in expected
    monkeypatch.setattr(shared.executor, "weights", weights)
    request, victim = shared.make_request(neighbour, DRAWN), shared.make_request(prompt, DRAWN)
    shared.add(request)
    while not request.generated:
        shared.step()
    launches.clear()
    run(shared, [victim])
    assert launches[0] == ("prefill", 1, len(prompt))
    assert (victim.finish_reason, victim.generated) == ("error", [])
    assert request.generated == expected


LAYER = AttentionLayer(
    layer_id=0, tp_q_head_num=8, tp_k_head_num=2, tp_v_head_num=2, head_dim=128, v_head_dim=128, scaling=0.1
)
HOPPER, CPU = Device("gpu", (9, 0)), Device("cpu")


@pytest.mark.parametrize(
    ("device", "layer", "options", "config", "rows"),
    [
        (HOPPER, {}, {}, {}, 15),
        (HOPPER, {}, {}, {"prefill_tokens": 21}, 10),
        (HOPPER, {}, {}, {"mixed_steps": False}, 0),
        (HOPPER, {}, {}, {"speculative": NgramDrafting()}, 0),
        (HOPPER, {}, {"implementation": "xla"}, {}, 0),
        (HOPPER, {}, {"dtype": "float32"}, {}, 15),
        (HOPPER, {"head_dim": 112, "v_head_dim": 112}, {}, {}, 15),
        (CPU, {}, {}, {}, 0),
        (CPU, {}, {}, {"mixed_steps": True}, 15),
        (CPU, {}, {}, {"mixed_steps": True, "speculative": NgramDrafting()}, 0),
    ],
)
def test_steps_mix_where_the_kernels_go_by_a_work_list(monkeypatch, device, layer, options, config, rows):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: device)
    config = EngineConfig(**{"num_pages": 64, "max_num_seqs": 16} | config)
    options = BackendOptions(
        **{"max_context_len": 1024, "page_size": 16, "max_num_seqs": 16, "dtype": "bfloat16"} | options
    )
    layers = (dataclasses.replace(LAYER, **layer),)
    assert mixed_rows(config, PagedAttentionBackend.for_model(layers, options)) == rows


def test_flashinfers_backend_is_asked_for_the_operations_that_it_calls(monkeypatch):
    """Its prompts attend to their own keys unpaged, unless the pool rounds them."""
    asked = []
    monkeypatch.setattr(
        "jattn.surfaces.flashinfer.backend.works_per_sequence", lambda name, **facts: asked.append(name) or True
    )
    options = BackendOptions(max_context_len=1024, page_size=16, max_num_seqs=16, dtype="bfloat16")
    assert mixed_rows(EngineConfig(num_pages=64), FlashInferAttnBackend.for_model((LAYER,), options)) > 0
    assert set(asked) == {"ragged_extend", "paged_extend"}
    asked.clear()
    options = dataclasses.replace(options, kv_cache_dtype="fp8")
    assert mixed_rows(EngineConfig(num_pages=64), FlashInferAttnBackend.for_model((LAYER,), options)) > 0
    assert asked == ["paged_extend"]
