"""Whoever is served beside a request, its tokens and log-probabilities have the same bits; on several devices too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.attention.paged import PagedAttentionBackend
from jattn.backend import backend_class
from jattn.checkpoint import Checkpoint
from jattn.device_mesh import OnAll
from jattn.matmul import MXFP4
from jattn.parallel import Parallel
from jattn.serving.config import EngineConfig
from jattn.serving.request import SamplingParams
from jattn.serving.resolved_config import resolved
from jattn.serving.steps.drafting import NgramDrafting
from jattn.serving.structured.params import StructuredOutputsParams
from jattn_kernels.call import Device
from tests.jattn.harness.clients import checkpoint
from tests.jattn.harness.several_devices import assert_all_hold_the_same, engine_of, write_llama
from tests.jattn.harness.tiny import CONFIG, plans_of, run, tiny_model
from tests.often import slow

ASKED = SamplingParams(max_tokens=10, temperature=0.0, logprobs=3, ignore_eos=True)
DRAWN = dataclasses.replace(ASKED, temperature=0.8, seed=3, logprobs=None)
RULED = dataclasses.replace(ASKED, repetition_penalty=1.3)
PROMPTS = [np.random.default_rng(2).integers(1, 60, length).tolist() for length in (3, 23, 9, 14)]


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_sums_and_logits_of_devices_have_the_same_bits_on_each_and_for_any_number_of_rows(devices):
    parallel = Parallel("tensor", devices)

    def exchange(parts):
        return parallel.all_reduce(parts[0]), parallel.gather_logits(parts[0])

    exchanged = jax.jit(OnAll(exchange, parallel, takes_shares=(True,), gives_shares=True))
    parts = np.random.default_rng(0).standard_normal((devices, 64, 96)).astype(np.float32)

    def rows_of(begin, end):
        (first, *others) = [
            [np.asarray(shard.data).reshape(end - begin, -1) for shard in shards]
            for shards in zip(*(x.addressable_shards for x in exchanged(jnp.asarray(parts[:, begin:end]))), strict=True)
        ]
        assert len(others) == devices - 1
        for other in others:
            np.testing.assert_array_equal(bits(other[0]), bits(first[0]))
            np.testing.assert_array_equal(bits(other[1]), bits(first[1]))
        return first

    summed, gathered = rows_of(0, 64)
    for begin, end in ((0, 1), (5, 6), (7, 24), (63, 64)):
        few = rows_of(begin, end)
        np.testing.assert_array_equal(bits(few[0]), bits(summed[begin:end]))
        np.testing.assert_array_equal(bits(few[1]), bits(gathered[begin:end]))


@pytest.mark.parametrize("devices", [slow(1), 2])
def test_neighbours_change_no_bit_of_a_request(tmp_path, devices):
    """They have prompts in chunks, draw, and have rules; without the promise their steps would be others."""
    small = {"smallest_decode_bucket": 1, "smallest_prefill_bucket": 4}  # would be steps of many sizes
    asked = {"batch_invariant": True, "full_sampling": True, "num_pages": 65, **small}
    engine = engine_of(Checkpoint(write_llama(tmp_path / "llama")), devices, **asked)
    steps = [(key.kind, key.size, key.variant) for key in engine.executor.compiled_steps.records]
    assert sorted(steps) == [("decode", 4, "full"), ("prefill", 16, "full"), ("score", 16, "full")]

    def served(prompts, params):
        requests = [engine.make_request(*each) for each in zip(prompts, params, strict=True)]
        run(engine, requests)
        if devices > 1:
            assert_all_hold_the_same(engine)
        return [answer(request) for request in requests]

    alone = [served([prompt], [ASKED])[0] for prompt in PROMPTS]
    assert served(PROMPTS, [ASKED] * 4) == alone
    assert served(PROMPTS[::-1], [ASKED] * 4) == alone[::-1]
    assert served([*PROMPTS[1:], PROMPTS[0]], [DRAWN, RULED, DRAWN, ASKED])[3] == alone[0]
    tokens = served([PROMPTS[2]], [DRAWN])[0][0]
    assert served([*PROMPTS[:2], PROMPTS[2], PROMPTS[3]], [RULED, ASKED, DRAWN, ASKED])[2][0] == tokens


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_neighbours_change_no_bit_of_what_an_llm_writes(devices):
    """After a checkpoint that was trained."""
    knobs = {"max_num_seqs": 8, "max_context_len": 128, "prefill_tokens": 64, "dtype": "float32", "progress": False}
    llm = jattn.LLM(checkpoint(), tensor_parallel=devices, batch_invariant=True, **knobs)
    texts = [
        "import os\nimport sys\n\n\nclass Parser:\n    def __init__(self",
        "def read(path):\n",
        "# -*-",
        "import re",
    ]
    params = jattn.SamplingParams(max_tokens=16, temperature=0.0, logprobs=4, ignore_eos=True)

    def served(*numbers):
        return [output.outputs[0] for output in llm.generate([texts[i] for i in numbers], params)]

    alone = [served(number)[0] for number in range(4)]
    for numbers in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0), (3, 2, 1, 0, 0, 1, 2, 3)):
        for number, found in zip(numbers, served(*numbers), strict=True):
            assert found.token_ids == alone[number].token_ids
            assert found.logprobs == alone[number].logprobs  # of floats, which are equal where their bits are


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_kernels_of_gpus_are_told(monkeypatch, platform):
    """Of a CPU XLA's attention serves, which makes no promise but for batches of one size: those there are."""
    monkeypatch.setattr("jattn.serving.resolved_config.default_device", lambda: Device(platform))
    for asked in (True, False):
        config = dataclasses.replace(CONFIG, batch_invariant=asked)
        backend = PagedAttentionBackend.for_model(
            tiny_model().attention_layers, resolved(config, tiny_model()).backend_options
        )
        assert [kind.spec.batch_invariant for kind in backend.kinds] == [asked and platform == "gpu"]
        assert [backend._kind(layer) in backend.kinds for layer in tiny_model().attention_layers] == [True]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"backend": "flashinfer"}, "`backend` must be paged where `batch_invariant` is True. Got 'flashinfer'"),
        ({"speculative": NgramDrafting()}, "`speculative` must be None where"),
        ({"mixed_steps": True}, "`mixed_steps` must be None where `batch_invariant` is True. Got True"),
        ({"structured_steps": True}, "`structured_steps` must be False where"),
    ],
)
def test_what_makes_steps_of_other_kinds_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(batch_invariant=True, **changes)


@pytest.mark.parametrize("backend", ["flash_attention", "flashinfer"])
def test_backends_of_other_names_refuse_the_promise(backend):
    options = dataclasses.replace(resolved(CONFIG, tiny_model()).backend_options, batch_invariant=True)
    with pytest.raises(NotImplementedError, match=f"`{backend}` does not promise `batch_invariant`: use `paged`"):
        backend_class(backend).for_model(tiny_model().attention_layers, options)


def test_models_whose_results_depend_on_a_batch_are_refused(monkeypatch):
    config = dataclasses.replace(CONFIG, batch_invariant=True)
    in_mxfp4 = nnx.clone(tiny_model())
    in_mxfp4.experts = nnx.Param(jnp.zeros((4, 4), MXFP4))
    with pytest.raises(NotImplementedError, match="must be False for this model: experts in mxfp4"):
        resolved(config, in_mxfp4)
    latent = dataclasses.replace(tiny_model().attention_layers[0], kv="latent", tp_k_head_num=1, tp_v_head_num=1)
    monkeypatch.setattr(type(tiny_model()), "attention_layers", (latent,))
    with pytest.raises(NotImplementedError, match="`batch_invariant` must be False for this model: a prompt's chunk"):
        resolved(config, tiny_model())


def test_structured_output_is_refused():
    engine = plans_of(dataclasses.replace(CONFIG, batch_invariant=True))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    with pytest.raises(ValueError, match="`structured_outputs` must be None where `batch_invariant` is True"):
        engine.make_request([1, 2], params)


def answer(request):
    """Tokens, and the bits of what was said of each."""
    said = [{token: np.float32(found.logprob).tobytes() for token, found in each.items()} for each in request.logprobs]
    return request.generated, said


def bits(x):
    return x.view(np.uint32)
