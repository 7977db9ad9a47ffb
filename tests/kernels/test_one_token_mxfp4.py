"""The mixture of one token with experts in mxfp4, in one kernel: under the interpreter, lowered, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Splits, added, routed_experts
from jattn_kernels.call import Device
from jattn_kernels.lowering.routing import routed
from jattn_kernels.routing_spec import Routing
from tests.kernels.harness.expert_cases import ExpertInputs, clamped_swiglu
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.short_rows import take_short_rows
from tests.kernels.test_few_bits_experts import assert_near, in_few_bits, shapes_of
from tests.often import slow


def assert_mixture(width, per_token, experts=32, biases=True):
    rng = np.random.default_rng(0)
    kernels = [in_few_bits("mxfp4", (2, experts, outputs, width), rng) for outputs in (2 * width, width)]
    x = jnp.asarray(rng.standard_normal((1, width)), jnp.bfloat16)
    logits = jnp.asarray(rng.standard_normal((1, experts)), jnp.float32)
    facts = {"activation": clamped_swiglu, "layer_index": jnp.int32(1)}
    if biases:
        of_outputs = {"gate_up_bias": 2 * width, "down_bias": width}
        facts |= {
            name: jnp.asarray(rng.standard_normal((2, experts, outputs)), x.dtype)
            for name, outputs in of_outputs.items()
        }
    routing = Routing(num_experts=experts, per_token=per_token, scoring="softmax_of_chosen")

    def mixture(x, logits, *kernels):
        return routed_experts(x, logits, routing, *kernels, in_splits=True, implementation="mosaic", **facts)

    out = jax.jit(mixture)(x, logits, *kernels)
    assert isinstance(out, Splits)  # of no other kernel's
    assert_near(added(out), ExpertInputs((x, *routed(logits, routing, None), *kernels), facts))


@pytest.mark.parametrize(("per_token", "biases"), [(4, True), slow(3, False)])
def test_kernel_without_races(monkeypatch, per_token, biases):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 3))
    take_short_rows(monkeypatch)
    with interpreted():
        assert_mixture(320, per_token, biases=biases)


def test_kernel_is_lowered_for_cuda(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    routing = Routing(num_experts=32, per_token=4, scoring="softmax_of_chosen")

    def mixture(x, logits, *kernels):
        return routed_experts(x, logits, routing, *kernels, layer_index=jnp.int32(1), in_splits=True).parts

    x, logits = jax.ShapeDtypeStruct((1, 2880), jnp.bfloat16), jax.ShapeDtypeStruct((1, 32), jnp.float32)
    traced = jax.jit(mixture).trace(x, logits, *shapes_of("mxfp4", 32, 2880, 2880))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("per_token", [1, 4])
def test_kernel_on_a_gpu(per_token):
    assert_mixture(2880, per_token)
