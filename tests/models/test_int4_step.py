"""A decode step in int4 whose layers are one kernel each, from attention on: against the same by their products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.decode_step import random_model, set_up
from bench.step_workload import LLAMA_3_8B, StepWorkload
from jattn.backend import BackendOptions, backend_class
from jattn.serving.config import EngineConfig
from jattn.serving.steps.plain import Steps
from jattn_models.llama import LlamaForCausalLM
from jattn_models.qwen2 import Qwen2ForCausalLM

QWEN2_5_7B = LLAMA_3_8B | {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def hidden_after_a_step(family, shapes):
    model = random_model(shapes | {"num_hidden_layers": 4}, family, quantization="int4")
    workload = StepWorkload(batch=1, ctx=600, page=16, model="", kv="bfloat16")
    setup = set_up(model, workload, steps=4)
    options = BackendOptions(max_context_len=604, page_size=16, max_num_seqs=1, dtype="bfloat16")
    backend = backend_class(EngineConfig().backend).for_model(model.attention_layers, options)
    run = jax.jit(functools.partial(Steps(model.graph, backend).forward_decode, variant="greedy"))
    _, _, unsampled = run(model.weights, setup.state, setup.pool, jnp.asarray(setup.plans[0]))
    return np.asarray(unsampled.hidden, np.float64)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "shapes"), [(LlamaForCausalLM, LLAMA_3_8B), (Qwen2ForCausalLM, QWEN2_5_7B)])
def test_a_step_in_int4_is_that_of_its_products(monkeypatch, family, shapes):
    in_one = hidden_after_a_step(family, shapes)
    monkeypatch.setattr("jattn_models.mlp.is_one_kernel", lambda *args, **options: False)
    by_products = hidden_after_a_step(family, shapes)
    off = in_one - by_products
    assert 0 < np.sqrt(np.mean(off**2)) < 0.02 * np.sqrt(np.mean(by_products**2))
