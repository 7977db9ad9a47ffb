"""On an NVIDIA GPU, mixtures of experts against the oracle, at sizes that each kind of tile serves."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Routing, mixture_of_experts, routed_experts
from jattn_kernels.call import default_device
from jattn_kernels.dispatch import implementations
from tests.kernels.harness.expert_cases import ExpertCase, assert_mixture, build, route_choices

pytestmark = pytest.mark.gpu

HOPPER = (9, 0)
MANY = {"experts": 128, "per_token": 8, "hidden": 256, "units": 128}
FEW = {"experts": 8, "per_token": 2, "hidden": 512, "units": 1024}
CASES = [
    ExpertCase(name=f"{name}_{tokens}", tokens=tokens, **sizes)
    for name, sizes in (("many", MANY), ("few", FEW))
    for tokens in (1, 5, 64, 200, 256, 300, 2048)
]
OTHERS = [
    ExpertCase(name="many_float16", tokens=300, dtype="float16", biases=True, clamped=True, layers=2, **MANY),
    ExpertCase(name="few_float16", tokens=5, dtype="float16", biases=True, clamped=True, layers=2, **FEW),
    ExpertCase(name="many_same", tokens=2048, choice="same", **MANY),
    ExpertCase(name="many_same_64", tokens=64, choice="same", **MANY),
    ExpertCase(name="few_strays", tokens=200, choice="strays", layers=2, **FEW),
    ExpertCase(name="many_strays_float16", tokens=64, choice="strays", dtype="float16", **MANY),
    ExpertCase(name="few_weighs_inputs", tokens=256, weighs_inputs=True, **(FEW | {"per_token": 1})),
    ExpertCase(name="many_weighs_inputs", tokens=9, weighs_inputs=True, choice="strays", **MANY),
    ExpertCase(name="many_twice", tokens=64, choice="twice", **MANY),
    ExpertCase(name="experts_not_of_8", tokens=70, **(FEW | {"experts": 6})),
    ExpertCase(name="half_empty_block", tokens=300, biases=True, **(MANY | {"hidden": 320, "units": 192})),
]
# One token goes through one kernel where its products take enough of a GPU's blocks.
ONE_KERNEL = [
    ExpertCase(name=f"one_{units}_{dtype}", tokens=1, experts=32, per_token=4, hidden=2048, units=units, dtype=dtype)
    for units, dtype in ((768, "bfloat16"), (1408, "float16"))
]
STATIC = ("activation", "weighs_inputs", "implementation")


@pytest.fixture(autouse=True)
def _on_a_gpu() -> None:
    assert jax.default_backend() == "gpu", "these tests were asked for, and JAX's default device is no GPU"


@pytest.fixture
def hopper():
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")


@pytest.mark.parametrize("implementation", [entry.name for entry in implementations()])
@pytest.mark.parametrize("case", [*CASES, *OTHERS], ids=lambda case: case.name)
def test_gpu_agrees_with_the_oracle(case, implementation):
    inputs = build(case)
    run = jax.jit(mixture_of_experts, static_argnames=STATIC)
    try:
        out = run(*inputs.args, **inputs.kwargs, implementation=implementation)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert_mixture(case, inputs, out)


ROUTED = [
    pytest.param(case, scoring, i % 2 == 1, id=f"{case.name}_{scoring}{'_biased' * (i % 2)}")
    for i, (case, scoring) in enumerate(
        zip(
            (*CASES, *ONE_KERNEL), itertools.cycle(("softmax", "sigmoid", "softmax_of_chosen", "softmax")), strict=False
        )
    )
]


@pytest.mark.parametrize(("case", "scoring", "biased"), ROUTED)
def test_routed_mixture_goes_where_the_oracle_routes(hopper, case, scoring, biased):
    """Logits are far enough apart that no rounding changes a choice."""
    rng = np.random.default_rng(1)
    logits = rng.permuted(np.tile(np.linspace(-4, 4, case.experts), (case.tokens, 1)), axis=1)
    logits = jnp.asarray(logits, jnp.float32)
    bias = jnp.asarray(rng.integers(2, size=case.experts), jnp.float32) if biased else None
    routing = Routing(
        num_experts=case.experts, per_token=case.per_token, scoring=scoring, normalised=scoring == "sigmoid"
    )
    inputs = build(case)
    x, _, _, *experts = inputs.args
    run = functools.partial(routed_experts, routing=routing, implementation="mosaic")

    @jax.jit
    def routed(x, logits, gate_up, down, bias):
        return run(x, logits, gate_up=gate_up, down=down, choice_bias=bias)

    assert_mixture(case, route_choices(inputs, logits, routing, bias), routed(x, logits, *experts, bias))


@pytest.mark.parametrize("tokens", [1, 8, 64, 200, 2048])
def test_routed_mixture_beside_shared_experts_goes_where_the_oracle_routes(hopper, tokens):
    case = ExpertCase(name="shared", tokens=tokens, experts=66, per_token=8, hidden=512, units=256)
    logits = np.random.default_rng(1).permuted(np.tile(np.linspace(-4, 4, 64), (tokens, 1)), axis=1)
    logits, routing = jnp.asarray(logits, jnp.float32), Routing(num_experts=64, per_token=6, shared=2)
    inputs = build(case)
    x, _, _, gate_up, down = inputs.args
    out = jax.jit(functools.partial(routed_experts, routing=routing))(x, logits, gate_up=gate_up, down=down)
    assert_mixture(case, route_choices(inputs, logits, routing), out)


@pytest.mark.parametrize("choice", ["any", "same"])
@pytest.mark.parametrize("sizes", [MANY, FEW], ids=["many", "few"])
def test_tokens_result_is_the_same_to_the_bit_whatever_its_neighbours_are(hopper, sizes, choice):
    x, weights, chosen, *experts = build(ExpertCase(name="bits", tokens=2048, choice=choice, **sizes)).args
    run = jax.jit(functools.partial(mixture_of_experts, implementation="mosaic"))
    among = run(x, weights, chosen, *experts)
    for tokens in (1, 5, 9, 17, 64, 65, 200, 256, 300):
        for begin in (0, 2048 - tokens):
            own = slice(begin, begin + tokens)
            chex.assert_trees_all_equal(run(x[own], weights[own], chosen[own], *experts), among[own])
