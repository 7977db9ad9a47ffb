"""Mixtures of experts with weights in fp8 against the oracle, and the sentences for what does not fit."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import QuantizedKernel, Routing, mixture_of_experts, quantize_kernel, reference, routed_experts
from jattn_kernels.call import Device
from tests.kernels.harness.expert_cases import ExpertCase, build, route_choices
from tests.often import often

MXFP4 = QuantizedKernel(values=jnp.ones((8, 128, 32), jnp.uint8), scales=jnp.ones((8, 128, 2), jnp.uint8))
CASES = [
    ExpertCase(name="float32", tokens=9, dtype="float32"),
    ExpertCase(name="one_token", tokens=1, dtype="float32", biases=True),
    ExpertCase(name="layers_with_biases", tokens=70, dtype="float32", layers=2, biases=True, clamped=True),
    ExpertCase(name="weighs_inputs", tokens=9, dtype="float32", weighs_inputs=True, per_token=1),
    ExpertCase(name="strays", tokens=20, choice="strays"),
]


def quantised(case):
    """A case's inputs with its experts in fp8, and what the oracle is given in their place."""
    inputs = build(case)
    kernels = [quantize_kernel(jnp.swapaxes(kernel, -1, -2)) for kernel in inputs.args[3:]]
    scales = dict(zip(("gate_up_scales", "down_scales"), (kernel.scales for kernel in kernels), strict=True))
    of_oracle = inputs._replace(
        args=(*inputs.args[:3], *(kernel.values for kernel in kernels)), kwargs=inputs.kwargs | scales
    )
    return inputs._replace(args=(*inputs.args[:3], *kernels)), of_oracle


def assert_near(out, expected, dtype):
    """As near as rounding to the dtype lets it."""
    assert np.isfinite(np.asarray(out, np.float64)).all()
    off = np.linalg.norm(np.asarray(out, np.float64) - expected) / np.linalg.norm(expected)
    assert off < {"float32": 1e-3, "bfloat16": 0.02}[dtype]


@pytest.mark.parametrize("case", often(CASES, CASES[2:]), ids=lambda case: case.name)
def test_mixture_is_the_oracles(case):
    inputs, of_oracle = quantised(case)
    run = jax.jit(mixture_of_experts, static_argnames=("activation", "weighs_inputs"))
    out = run(*inputs.args, **inputs.kwargs)
    assert out.dtype == case.dtype
    assert_near(out, reference.mixture_of_experts(*of_oracle.args, **of_oracle.kwargs), case.dtype)


def test_routed_mixture_is_the_oracles():
    case = CASES[0]
    inputs, of_oracle = quantised(case)
    x, _, _, *experts = inputs.args
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((case.tokens, case.experts)), jnp.float32)
    routing = Routing(num_experts=case.experts, per_token=2)
    expected = reference.mixture_of_experts(*route_choices(of_oracle, logits, routing).args, **of_oracle.kwargs)
    assert_near(jax.jit(routed_experts, static_argnums=2)(x, logits, routing, *experts), expected, case.dtype)


def test_a_scale_for_each_expert_is_every_outputs():
    inputs, _ = quantised(CASES[0])
    x, weights, chosen, first, second = inputs.args
    some, every = (jnp.full((8, n, 1), 0.01) for n in (1, 128))
    of_expert, of_output = (
        mixture_of_experts(x, weights, chosen, QuantizedKernel(values=first.values, scales=scales), second)
        for scales in (some, every)
    )
    np.testing.assert_array_equal(of_expert, of_output)


def test_kernels_that_take_no_such_experts_leave_them_to_xla(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    inputs, of_oracle = quantised(CASES[-1])  # 64 hidden units
    expected = reference.mixture_of_experts(*of_oracle.args, **of_oracle.kwargs)
    assert_near(mixture_of_experts(*inputs.args, **inputs.kwargs), expected, "bfloat16")
    with pytest.raises(NotImplementedError, match="experts of a multiple of 128 hidden units, not 20 of 128, and 64"):
        mixture_of_experts(*inputs.args, **inputs.kwargs, implementation="mosaic")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"down": jnp.ones((8, 64, 128))},
            "must both be quantised, or neither. Got down.dtype=float32",
        ),
        ({"gate_up": jnp.ones((8, 128, 128))}, "both be quantised, or neither. Got gate_up.dtype=float32"),
        ({"down_scales": jnp.ones((8, 128, 1), jnp.bfloat16)}, "`down` must have float8_e4m3fn values and float32"),
        (
            {"down_scales": jnp.ones((8, 128, 2))},
            "scales of the same kind. Got one of each channel and block",
        ),
        ({"down": MXFP4}, r"`down` must have uint8 values \[E, F, D / 2\] and uint8 scales \[E, D / 32, F\]"),
        ({"down_scales": jnp.ones((128, 1))}, r"`down` must have values \[F, D\] .* after L, E, where"),
        ({"x": jnp.ones((9, 64))}, r"`gate_up` and `down` must be \[..., E, 64, 2F\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    x, weights, chosen, gate_up, down = quantised(CASES[0])[0].args
    if "down_scales" in changes:
        down = QuantizedKernel(values=down.values, scales=changes.pop("down_scales"))
    given = {"x": x, "weights": weights, "chosen": chosen, "gate_up": gate_up, "down": down} | changes
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(mixture_of_experts)(**given)
