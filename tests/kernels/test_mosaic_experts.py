"""The Hopper mixture of experts on the CPU: against the oracle under the interpreter, and lowered for CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Routing, mixture_of_experts, routed_experts
from jattn_kernels.call import Device
from jattn_kernels.lowering import expert_groups
from jattn_kernels.mosaic.sm90.experts import tile_sizes
from tests.kernels.harness.copy_places import misplaced_copies
from tests.kernels.harness.expert_cases import ExpertCase, assert_mixture, build, clamped_swiglu, route_choices
from tests.kernels.harness.interpreter import interpreted
from tests.often import often, often_together, slow

STATIC = ("activation", "weighs_inputs")


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU of two SMs; the interpreter is it, and slow."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 2))
    with interpreted():
        yield


def first_token(inputs):
    """The same inputs of one token."""
    return inputs._replace(args=(*(array[:1] for array in inputs.args[:3]), *inputs.args[3:]))


def mixed(inputs):
    """What the kernels give, compiled as one: by itself each operation around the kernels would be."""
    # Anew, as tests patch what it calls.
    run = jax.jit(functools.partial(mixture_of_experts, implementation="mosaic"), static_argnames=STATIC)
    return run(*inputs.args, **inputs.kwargs)


INTERPRETED = [
    ExpertCase(name="strays", tokens=9, choice="strays", dtype="float16"),
    ExpertCase(name="biases_clamped", tokens=5, per_token=3, biases=True, clamped=True, hidden=64, units=128),
    ExpertCase(name="weighs_inputs", tokens=9, weighs_inputs=True, choice="strays", units=192),
    ExpertCase(name="two_tiles", tokens=70, per_token=1, choice="same"),
]
SLOW = [
    ExpertCase(name="one_token", tokens=1, layers=2),
    ExpertCase(name="twice", tokens=5, choice="twice", biases=True),
    ExpertCase(name="order_by_xla", tokens=9, experts=6),
    *(ExpertCase(name=f"tokens_{tokens}", tokens=tokens) for tokens in (5, 9, 70)),
    ExpertCase(name="experts_16", tokens=70, experts=16, per_token=3, choice="strays", biases=True),
    ExpertCase(name="groups_by_xla", tokens=300, per_token=1, hidden=64),
    ExpertCase(name="weighs_one_input", tokens=9, per_token=1, weighs_inputs=True, layers=2, biases=True),
    ExpertCase(name="strays_of_70", tokens=70, choice="strays", weighs_inputs=True, clamped=True),
]


# Stray choices are in weighs_inputs too, and several tiles of rows in the test below.
OFTEN = ("biases_clamped", "weighs_inputs")


@pytest.mark.parametrize(
    "case",
    often([*INTERPRETED, *SLOW], [case for case in INTERPRETED if case.name in OFTEN]),
    ids=lambda case: case.name,
)
def test_kernels_agree_with_the_oracle(hopper, case):
    inputs = build(case)
    assert_mixture(case, inputs, mixed(inputs))


PROMPTS = [
    ExpertCase(name="last_block_half_empty", tokens=70, per_token=1, hidden=320, units=192, choice="same"),
    pytest.param(
        ExpertCase(
            name="all",
            tokens=140,
            per_token=1,
            hidden=320,
            units=192,
            biases=True,
            clamped=True,
            layers=2,
            choice="same",
        ),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: case.name)
def test_tiles_of_prompts_and_a_result_in_pieces(hopper, monkeypatch, case):
    monkeypatch.setattr(tile_sizes, "_ROWS_OF_PROMPTS", 1)
    monkeypatch.setattr(expert_groups, "_MOST_BYTES", 1)
    inputs = build(case)
    assert_mixture(case, inputs, mixed(inputs))


@pytest.mark.parametrize("tokens", [9, slow(70)])
def test_tokens_result_does_not_depend_on_its_neighbours(hopper, tokens):
    x, weights, chosen, *experts = build(ExpertCase(name="bits", tokens=tokens)).args
    run = functools.partial(mixture_of_experts, implementation="mosaic")
    among = jax.jit(run)(x, weights, chosen, *experts)
    own = slice(tokens - 1, tokens)
    np.testing.assert_array_equal(among[own], jax.jit(run)(x[own], weights[own], chosen[own], *experts))


def test_routed_mixture_is_the_mixture_of_what_is_routed(hopper):
    case = ExpertCase(name="routed", tokens=9, biases=True, layers=2)
    inputs = build(case)
    routing = Routing(num_experts=case.experts, per_token=case.per_token, normalised=True)
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((case.tokens, case.experts)), jnp.float32)
    inputs = route_choices(inputs, logits, routing)
    x, _, _, *experts = inputs.args
    run = functools.partial(routed_experts, routing=routing, implementation="mosaic")
    out = jax.jit(lambda *args, **arrays: run(args[0], args[1], gate_up=args[2], down=args[3], **arrays))(
        x, logits, *experts, **{name: value for name, value in inputs.kwargs.items() if name != "weighs_inputs"}
    )
    assert_mixture(case, inputs, out)


@pytest.mark.parametrize(
    ("scoring", "biased", "dtype", "shared"),
    [slow("softmax", False, "bfloat16", 0), ("sigmoid", True, "float16", 0), slow("softmax", False, "bfloat16", 1)],
)
def test_one_tokens_mixture_agrees_with_the_oracle(hopper, scoring, biased, dtype, shared):
    sizes = {"experts": 32 + shared, "per_token": 3, "hidden": 256, "units": 128}
    case = ExpertCase(name="one", tokens=2, layers=2, dtype=dtype, **sizes)
    inputs = build(case)
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.permuted(np.linspace(-4, 4, 64)).reshape(2, -1), jnp.float32)
    bias = jnp.asarray(rng.integers(2, size=32), jnp.float32) if biased else None
    routing = Routing(num_experts=32, per_token=3 - shared, scoring=scoring, shared=shared)
    x, _, _, *experts = inputs.args
    run = functools.partial(routed_experts, routing=routing, implementation="mosaic", choice_bias=bias)

    @jax.jit
    def routed(x, logits):
        return run(x, logits, gate_up=experts[0], down=experts[1], layer_index=1)

    one = routed(x[:1], logits[:1])
    assert_mixture(dataclasses.replace(case, tokens=1), first_token(route_choices(inputs, logits, routing, bias)), one)


@pytest.mark.parametrize(("hidden", "units", "kernels"), [(2048, 768, 1), (2048, 1408, 1), (512, 192, 3)])
def test_one_tokens_mixture_is_one_kernel_where_it_fits(monkeypatch, hidden, units, kernels):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    shapes = (1, hidden), (1, 128), (2, 128, hidden, 2 * units), (2, 128, units, hidden)
    x, logits, gate_up, down = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    routing = Routing(num_experts=128, per_token=8, normalised=True)

    def routed(x, logits, gate_up, down, layer):
        return routed_experts(x, logits, routing, gate_up, down, layer_index=layer)

    traced = jax.jit(routed).trace(x, logits, gate_up, down, jax.ShapeDtypeStruct((), "int32"))
    assert misplaced_copies(traced.jaxpr.jaxpr)[1] == []
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == kernels


LOWERED = [
    (tokens, experts, *facts)
    for tokens in (1, 8, 16, 64, 256, 2048)  # each size of a tile among them
    for experts in (8, 128, 256)
    for facts in (("bfloat16", False), ("float16", True))
]
QUICKLY = [(1, 128, "bfloat16", False, True), (2048, 128, "bfloat16", False, False)]


@pytest.mark.parametrize(
    ("tokens", "experts", "dtype", "extra", "routed"),
    often_together([(*facts, routed) for facts in LOWERED for routed in (False, True)], QUICKLY),
)
def test_kernels_lower_for_cuda(monkeypatch, tokens, experts, dtype, extra, routed):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    hidden, units, per_token = 512, 192, 4

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    arrays = {"gate_up": array(2, experts, hidden, 2 * units), "down": array(2, experts, units, hidden)}
    if extra:
        arrays |= {"gate_up_bias": array(2, experts, 2 * units), "down_bias": array(2, experts, hidden)}
    arrays |= {"x": array(tokens, hidden), "layer_index": array(dtype="int32")}
    static = {"activation": clamped_swiglu if extra else None, "implementation": "mosaic"}
    if routed:
        routing = Routing(num_experts=experts, per_token=per_token, scoring="sigmoid", normalised=True)
        run = functools.partial(routed_experts, routing=routing, **static)
        arrays["logits"] = array(tokens, experts)
        arrays |= {"choice_bias": array(experts)} if extra else {}
    else:
        run = functools.partial(mixture_of_experts, **static)
        arrays["weights"] = array(tokens, per_token, dtype="float32")
        arrays["chosen"] = array(tokens, per_token, dtype="int32")
    text = jax.jit(run).trace(**arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
