"""A model that GPUs of one host share, as many as there are: the text of one, and bits that no neighbour changes."""

import functools

import jax
import pytest

import jattn
from tests.jattn.harness.clients import checkpoint

pytestmark = pytest.mark.gpu
TEXTS = ["import os\nimport sys\n\n\nclass Parser:\n    def __init__(self", "def read(path):\n", "# -*- ", "import re"]
# Float32, steps of one size: what differs is how many devices there are, or who is served.
KNOBS = {"dtype": "float32", "max_num_seqs": 8, "max_context_len": 256, "prefill_tokens": 64, "progress": False}
KNOBS |= {"smallest_prefill_bucket": 64, "greedy_steps": False, "compile_in_background": False}


@pytest.fixture(params=[2, 4])  # the bundled checkpoint has four heads
def devices(request):
    if jax.default_backend() != "gpu" or len(jax.local_devices()) < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return request.param


@functools.cache
def llm(devices, **changes):
    return jattn.LLM(checkpoint(), tensor_parallel=devices, **KNOBS, **changes)


def test_several_gpus_give_the_text_of_one(devices):
    params = jattn.SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    one, several = ([output.text for output in llm(number).generate(TEXTS, params)] for number in (1, devices))
    assert several == one


def test_neighbours_change_no_bit_of_a_request_of_several_gpus(devices):
    params = jattn.SamplingParams(max_tokens=24, temperature=0.0, logprobs=4, ignore_eos=True)

    def served(*numbers):
        answers = llm(devices, batch_invariant=True).generate([TEXTS[i] for i in numbers], params)
        return [(answer.outputs[0].token_ids, answer.outputs[0].logprobs) for answer in answers]

    alone = [served(number)[0] for number in range(4)]
    for numbers in ((0, 1, 2, 3), (3, 1), (3, 2, 1, 0, 0, 1, 2, 3)):
        assert served(*numbers) == [alone[number] for number in numbers]
