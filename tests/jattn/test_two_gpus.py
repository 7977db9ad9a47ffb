"""A model that two GPUs of one host share: the text of one, and bits that no neighbour changes."""

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


@pytest.fixture(autouse=True)
def two_gpus():
    if jax.default_backend() != "gpu" or len(jax.local_devices()) < 2:
        pytest.skip("needs two GPUs")


@functools.cache
def llm(devices, **changes):
    return jattn.LLM(checkpoint(), tensor_parallel=devices, **KNOBS, **changes)


def test_two_gpus_give_the_text_of_one():
    params = jattn.SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    one, two = ([output.text for output in llm(devices).generate(TEXTS, params)] for devices in (1, 2))
    assert two == one


def test_neighbours_change_no_bit_of_a_request_of_two_gpus():
    params = jattn.SamplingParams(max_tokens=24, temperature=0.0, logprobs=4, ignore_eos=True)

    def served(*numbers):
        answers = llm(2, batch_invariant=True).generate([TEXTS[i] for i in numbers], params)
        return [(answer.outputs[0].token_ids, answer.outputs[0].logprobs) for answer in answers]

    alone = [served(number)[0] for number in range(4)]
    for numbers in ((0, 1, 2, 3), (3, 1), (3, 2, 1, 0, 0, 1, 2, 3)):
        assert served(*numbers) == [alone[number] for number in numbers]
