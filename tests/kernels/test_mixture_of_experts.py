"""Mixtures of experts in portable jnp against the oracle, and the sentences for what does not fit."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Routing, mixture_of_experts, reference, routed_experts
from jattn_kernels.call import Device, ExpertsCall
from jattn_kernels.dispatch import choose
from tests.kernels.harness.expert_cases import ExpertCase, assert_mixture, build, route_choices

CASES = [
    *(ExpertCase(name=f"tokens_{tokens}", tokens=tokens, dtype="float32") for tokens in (1, 5, 9, 70, 300)),
    ExpertCase(name="bfloat16", tokens=9, experts=16, per_token=3),
    ExpertCase(name="float16", tokens=70, per_token=1, dtype="float16"),
    ExpertCase(name="odd_sizes", tokens=5, experts=6, hidden=20, units=12, dtype="float32"),
    ExpertCase(name="same", tokens=300, experts=6, choice="same", per_token=3),  # more rows than a tile
    ExpertCase(name="strays", tokens=70, choice="strays"),
    ExpertCase(name="strays_of_one", tokens=1, choice="strays", biases=True),
    ExpertCase(name="twice", tokens=9, choice="twice", biases=True, dtype="float32"),
    ExpertCase(name="biases", tokens=9, per_token=3, biases=True),
    ExpertCase(name="clamped_layers", tokens=5, biases=True, clamped=True, layers=3),
    ExpertCase(name="weighs_one_input", tokens=9, per_token=1, weighs_inputs=True, biases=True),
    ExpertCase(name="weighs_inputs_layers", tokens=70, weighs_inputs=True, layers=2, choice="strays", dtype="float16"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_agrees_with_the_oracle(case):
    inputs = build(case)
    run = jax.jit(mixture_of_experts, static_argnames=("activation", "weighs_inputs", "implementation"))
    assert_mixture(case, inputs, run(*inputs.args, **inputs.kwargs, implementation="xla"))


CASE = ExpertCase(name="plain", tokens=5, experts=6, hidden=8, units=4, dtype="float32")
SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen")


@pytest.mark.parametrize("scoring", SCORINGS)
def test_routed_mixture_is_the_mixture_of_what_is_routed(scoring):
    inputs = build(CASE)
    x, _, _, *experts = inputs.args
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((CASE.tokens, CASE.experts)), jnp.float32)
    routing = Routing(num_experts=CASE.experts, per_token=CASE.per_token, scoring=scoring)
    bias = jnp.arange(6.0) / 10
    routed = functools.partial(routed_experts, implementation="xla")
    out = jax.jit(routed, static_argnums=2)(x, logits, routing, *experts, choice_bias=bias)
    assert_mixture(CASE, route_choices(inputs, logits, routing, bias), out)


def test_groups_of_experts_are_routed_too():
    inputs = build(CASE)
    x, _, _, *experts = inputs.args
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((CASE.tokens, CASE.experts)), jnp.float32)
    routing = Routing(num_experts=6, per_token=2, num_groups=3, groups_per_token=1, scoring="sigmoid")
    out = jax.jit(routed_experts, static_argnums=2)(x, logits, routing, *experts)
    assert_mixture(CASE, route_choices(inputs, logits, routing), out)


@pytest.mark.parametrize("routed", [False, True], ids=["given", "routed"])
def test_no_tokens_have_no_results(routed):
    x, weights, chosen, *experts = build(CASE).args
    if routed:
        out = routed_experts(x[:0], jnp.zeros((0, 6)), Routing(num_experts=6, per_token=2), *experts)
    else:
        out = mixture_of_experts(x[:0], weights[:0], chosen[:0], *experts)
    assert (out.shape, out.dtype) == ((0, 8), jnp.float32)


def test_stack_is_read_in_place_at_a_traced_layer():
    case = dataclasses.replace(CASE, layers=3)
    inputs = build(case)
    layer = inputs.kwargs.pop("layer_index")
    at = jax.jit(lambda layer: mixture_of_experts(*inputs.args, layer_index=layer, implementation="xla"))
    inputs.kwargs["layer_index"] = layer
    assert_mixture(case, inputs, at(layer))
    assert np.isnan(at(jnp.int32(0))).any()  # the layers beside it are NaN


def test_numpy_arrays_are_taken():
    inputs = build(CASE)
    out = inspect.unwrap(mixture_of_experts)(*(np.asarray(array) for array in inputs.args))
    assert_mixture(CASE, inputs, out)


def test_oracle_by_hand():
    """One expert of one hidden unit: 2 * (silu(3) * 6 * 5 + 1), and nothing from experts that are not."""
    x, gate_up, down = np.array([[3.0]]), np.array([[[1.0, 2.0]]]), np.array([[[5.0]]])
    arguments = x, np.array([[2.0, 9.0, 9.0]]), np.array([[0, 1, -1]]), gate_up, down
    silu = 3 / (1 + np.exp(-3))
    out = reference.mixture_of_experts(*arguments, down_bias=np.array([[1.0]]))
    np.testing.assert_allclose(out, [[2 * (silu * 6 * 5 + 1)]])
    out = reference.mixture_of_experts(*arguments, activation=np.multiply, weighs_inputs=True)
    np.testing.assert_allclose(out, [[6 * 12 * 5]])


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


GIVEN = {
    "x": zeros(5, 8),
    "weights": zeros(5, 2),
    "chosen": zeros(5, 2, dtype="int32"),
    "gate_up": zeros(6, 8, 8),
    "down": zeros(6, 4, 8),
}
STACKED = {"gate_up": zeros(3, 6, 8, 8), "down": zeros(3, 6, 4, 8)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": [[0.0]]}, "`x` must be an array of JAX or NumPy. Got a list"),
        ({"weights": None}, "`weights` must be an array of JAX or NumPy. Got None"),
        ({"chosen": 1}, "`chosen` must be an array of JAX or NumPy. Got an int"),
        ({"weights": zeros(5, 2, dtype="int32")}, r"`weights` must be float32 \[T, k\], .* Got weights.dtype=int32"),
        ({"weights": zeros(4, 2)}, r"`weights` must be .*each row of x. .*weights.shape=\(4, 2\), x.shape=\(5, 8\)"),
        ({"weights": zeros(5)}, r"`weights` must be .*weights.shape=\(5,\)"),
        ({"weights": zeros(5, 0)}, r"`weights` must be .*weights.shape=\(5, 0\)"),
        ({"chosen": zeros(5, 2)}, r"`chosen` must be int32 \[5, 2\], an expert for each weight. Got .*dtype=float32"),
        ({"chosen": zeros(5, 3, dtype="int32")}, r"`chosen` must be int32 \[5, 2\], .*chosen.shape=\(5, 3\)"),
        ({"x": zeros(5, 2, 4)}, r"`x` must be \[T, D\]. Got x.shape=\(5, 2, 4\)"),
        ({"x": zeros(5, 8, dtype="int8")}, "`x` must be one of float32, bfloat16, float16. Got x.dtype=int8"),
        ({"gate_up": None}, "`gate_up` must be an array of JAX or NumPy. Got None"),
        ({"gate_up": zeros(8, 8)}, r"`gate_up` must be \[E, D, 2F\]. Got gate_up.shape=\(8, 8\)"),
        ({"down": zeros(1, 6, 4, 8)}, r"`down` must be \[E, F, D\]. Got down.shape=\(1, 6, 4, 8\)"),
        ({"layer_index": 0}, r"`gate_up` must be \[L, E, D, 2F\]. Got gate_up.shape=\(6, 8, 8\)"),
        ({"gate_up": zeros(6, 8, 12)}, r"`gate_up` and `down` must be \[..., E, 8, 2F\] .*gate_up.shape=\(6, 8, 12\)"),
        ({"gate_up": zeros(5, 8, 8)}, r"`gate_up` and `down` must be .*gate_up.shape=\(5, 8, 8\)"),
        ({"down": zeros(6, 4, 16)}, r"`gate_up` and `down` must be .*down.shape=\(6, 4, 16\)"),
        ({"gate_up": zeros(0, 8, 8), "down": zeros(0, 4, 8)}, r"`gate_up` and `down` must be .*\(0, 8, 8\)"),
        ({"gate_up": zeros(6, 8, 8, dtype="float16")}, "`x` and `gate_up` must have one dtype. Got .*float16"),
        ({"down": zeros(6, 4, 8, dtype="int8")}, "`x` and `down` must have one dtype. Got .*int8"),
        ({"gate_up_bias": 1.0}, "`gate_up_bias` must be an array of JAX or NumPy. Got a float"),
        ({"gate_up_bias": zeros(6, 4)}, r"`gate_up_bias` must be \[6, 8\]. Got gate_up_bias.shape=\(6, 4\)"),
        ({"down_bias": zeros(8)}, r"`down_bias` must be \[6, 8\]. Got down_bias.shape=\(8,\)"),
        ({"down_bias": zeros(6, 8, dtype="float16")}, "`x` and `down_bias` must have one dtype"),
        ({**STACKED, "layer_index": 3}, "`layer_index` must be in 0 .. 2. Got layer_index=3"),
        ({**STACKED, "layer_index": 1.0}, "`layer_index` must be an int or an int32 scalar. Got layer_index=1.0"),
        ({"implementation": "cuda"}, "`implementation` must be None or one of: mosaic, triton, xla. Got "),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    unchecked = inspect.unwrap(mixture_of_experts)  # as users have it, whose types nobody checks
    with pytest.raises(ValueError, match=message):
        unchecked(**{**GIVEN, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": zeros(4, 6)}, r"`logits` must have a row for each row of x. .*logits.shape=\(4, 6\), x.shape=\(5"),
        ({"logits": zeros(5, 8)}, "`logits` must have a column an expert, 6"),
        ({"logits": zeros(5, 6, dtype="int32")}, "`logits` must be one of float32, .* Got logits.dtype=int32"),
        ({"routing": None}, "`routing` must be a Routing. Got None"),
        ({"x": None}, "`x` must be an array of JAX or NumPy. Got None"),
        ({"choice_bias": zeros(5)}, r"`choice_bias` must have a number an expert, \[6\]. Got choice_bias.shape=\(5,\)"),
        ({"choice_bias": 0.5}, "`choice_bias` must be an array of JAX or NumPy. Got a float"),
        (
            {"logits": zeros(5, 4), "routing": Routing(num_experts=4, per_token=2)},
            "`routing` must be over the experts of `gate_up`, 6. Got num_experts=4, shared=0",
        ),
    ],
)
def test_routed_arguments_that_do_not_fit_are_refused(arguments, message):
    unchecked = inspect.unwrap(routed_experts)
    experts = {name: value for name, value in GIVEN.items() if name not in ("weights", "chosen")}
    given = {**experts, "logits": zeros(5, 6), "routing": Routing(num_experts=6, per_token=2)}
    with pytest.raises(ValueError, match=message):
        unchecked(**{**given, **arguments})


HOPPER_CALL = ExpertsCall(
    num_tokens=5,
    per_token=2,
    num_experts=6,
    hidden_size=128,
    units=64,
    dtype="bfloat16",
    kernel_dtype="bfloat16",
    activation=jnp.multiply,
    device=Device("gpu", (9, 0)),
)


@pytest.mark.parametrize(
    ("change", "sentence", "other"),
    [
        ({"dtype": "float32", "kernel_dtype": "float32"}, "`mosaic` does not take float32 tokens", "triton"),
        ({"kernel_dtype": "float16"}, "`mosaic` does not take bfloat16 tokens and float16 experts.", "xla"),
        ({"units": 96}, "`mosaic` takes some tokens of a multiple of 64 numbers, .* not 5 of 128, and 96.", "triton"),
        ({"hidden_size": 96}, "a multiple of 64 hidden units, not 5 of 96, and 64.", "triton"),
        ({"num_tokens": 0}, "not 0 of 128, and 64.", "triton"),
        ({"device": Device("gpu", (8, 0))}, "Hopper", "triton"),
        ({"device": Device("cpu")}, "this is cpu.", "xla"),
        ({"modes": frozenset({"check_vma"})}, "give it check_vma=False", "xla"),
    ],
    ids=str,
)
def test_mosaic_refuses_in_a_sentence_and_another_serves(change, sentence, other):
    assert choose(HOPPER_CALL).implementation.name == "mosaic"
    call = dataclasses.replace(HOPPER_CALL, **change)
    with pytest.raises(NotImplementedError, match=f"{sentence}.*Use implementation='{other}'"):
        choose(call, "mosaic")
    assert choose(call).implementation.name == other
