"""Triton's mixture of experts by its interpreter against the oracle, and what its kernel makes of activations."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Routing, mixture_of_experts, routed_experts
from jattn_kernels.call import Device, ExpertsCall
from jattn_kernels.lowering import expert_groups
from jattn_kernels.lowering.expert_groups import silu_gate
from jattn_kernels.triton.experts import entry, tile_sizes
from jattn_kernels.triton.experts.activation import Step, steps_of
from jattn_kernels.triton.experts.grouped_product import grouped_product
from jattn_kernels.triton.gpus import SHARED_MEMORY, num_sms
from jattn_kernels.triton.implementation import refuses
from tests.kernels.harness.expert_cases import ExpertCase, assert_mixture, build, clamped_swiglu, route_choices
from tests.kernels.harness.triton_interpreter import interpreted  # first: kernels are interpreted
from tests.often import slow

SMALL = {"hidden": 64, "units": 32}
CASES = [
    ExpertCase(name="one_token", tokens=1, layers=2, **SMALL),
    ExpertCase(name="float16", tokens=9, choice="strays", dtype="float16", **SMALL),
    ExpertCase(name="odd_sizes", tokens=5, experts=6, hidden=20, units=12, dtype="float32", biases=True),
    ExpertCase(name="odd_blocks", tokens=3, experts=3, hidden=200, units=72, biases=True, layers=2),
    ExpertCase(name="weighs_inputs", tokens=9, weighs_inputs=True, choice="strays", **SMALL),
    ExpertCase(name="twice", tokens=5, choice="twice", biases=True, **SMALL),
    ExpertCase(name="two_tiles", tokens=40, experts=20, per_token=1, choice="same", **SMALL),
]
SLOW = [
    ExpertCase(name="float32", tokens=5, per_token=3, biases=True, clamped=True, dtype="float32", **SMALL),
    ExpertCase(name="tiles_of_32", tokens=40, experts=5, per_token=2, choice="strays", **SMALL),
    *(ExpertCase(name=f"tokens_{tokens}", tokens=tokens, experts=16, per_token=3) for tokens in (1, 9, 64, 300)),
    ExpertCase(name="wide", tokens=64, hidden=512, units=320, biases=True, clamped=True, layers=3, choice="strays"),
    ExpertCase(name="weighs_inputs_300", tokens=300, weighs_inputs=True, choice="strays", dtype="float16"),
    ExpertCase(name="tiles_of_128", tokens=600, experts=3, per_token=1, dtype="float32", biases=True),
]


@pytest.fixture(autouse=True)
def _interpreted():
    with interpreted():
        yield


def mixed(inputs):
    """What the kernels give, compiled as one: by itself each operation around the kernels would be."""
    static = ("activation", "weighs_inputs")
    run = jax.jit(functools.partial(mixture_of_experts, implementation="triton"), static_argnames=static)
    return run(*inputs.args, **inputs.kwargs)


@pytest.mark.parametrize("case", [*CASES, *(slow(case) for case in SLOW)], ids=lambda case: case.name)
def test_kernels_agree_with_the_oracle(case):
    inputs = build(case)
    assert_mixture(case, inputs, mixed(inputs))


PROMPT = ExpertCase(name="prompt", tokens=70, choice="same", biases=True, layers=2, hidden=320, units=72)


QUICK = ((128, (9, 0), "bfloat16"),)
PROMPT_TILES = [
    pytest.param(*facts, marks=() if facts in QUICK else pytest.mark.slow)
    for facts in itertools.product((64, 128), ((8, 6), (9, 0)), ("bfloat16", "float32"))
]


@pytest.mark.parametrize(("block_rows", "capability", "dtype"), PROMPT_TILES)
def test_tiles_of_prompts_and_a_result_in_pieces(monkeypatch, block_rows, capability, dtype):
    """Of two experts' tiles, one or two each, three are neighbours."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", capability))
    monkeypatch.setattr(tile_sizes, "_BLOCK_ROWS", ((tile_sizes._MOST_BLOCK_ROWS, block_rows),))
    monkeypatch.setattr(tile_sizes, "_TOGETHER", 3 * block_rows)
    monkeypatch.setattr(expert_groups, "_MOST_BYTES", 1)
    case = dataclasses.replace(PROMPT, dtype=dtype)
    inputs = build(case)
    assert_mixture(case, inputs, mixed(inputs))


@pytest.mark.parametrize("weighs_inputs", [False, slow(True)])
def test_products_of_few_programs_are_split(monkeypatch, weighs_inputs):
    monkeypatch.setattr(tile_sizes, "_LEAST_SPLIT", 40)
    case = ExpertCase(
        name="split", tokens=3, choice="strays", hidden=320, units=400, biases=True, weighs_inputs=weighs_inputs
    )
    parts = []

    def product(*args, **facts):
        parts.append(grouped_product(*args, **facts))
        return parts[-1]

    monkeypatch.setattr(entry, "grouped_product", product)
    inputs = build(case)
    assert_mixture(case, inputs, mixed(inputs))
    assert [part.shape[0] for part in parts] == [2, 4]  # of 78 programs and 30, on 108 SMs


def gelu_tanh(gate: Any, up: Any) -> Any:
    """A gate that the kernel has not: XLA applies it."""
    xp = np if isinstance(gate, np.ndarray) else jnp
    return 0.5 * gate * (1.0 + xp.tanh(0.7978845608 * (gate + 0.044715 * gate * gate * gate))) * up


def gelu_erf(gate: Any, up: Any) -> Any:
    """A gate that is no sigmoid."""
    erf = np.vectorize(math.erf, otypes=[np.float64]) if isinstance(gate, np.ndarray) else jax.scipy.special.erf
    return 0.5 * gate * (1.0 + erf(gate / 1.4142135623)) * up


def squared_relu(gate: Any, up: Any) -> Any:
    """A gate that has no exponential, and what stands on the left of a difference."""
    xp = np if isinstance(gate, np.ndarray) else jnp
    return xp.square(xp.maximum(gate, 0.0)) * -(1.0 - up)


def swish(gate: Any, up: Any) -> Any:
    """silu by JAX's own function, which is compiled by itself."""
    return gate / (1 + np.exp(-gate)) * up if isinstance(gate, np.ndarray) else jax.nn.silu(gate) * up


@pytest.mark.parametrize("activation", [gelu_tanh, gelu_erf, slow(squared_relu), slow(swish), clamped_swiglu])
def test_activations_agree_with_the_oracle(activation):
    assert (steps_of(activation) is None) == (activation is gelu_tanh)
    case = ExpertCase(name=activation.__name__, tokens=9, choice="strays", biases=True, dtype="float32", **SMALL)
    inputs = build(case)
    inputs.kwargs["activation"] = activation
    assert_mixture(case, inputs, mixed(inputs))


def test_activation_as_a_program():
    """silu(gate) * up: its steps take the gate's, 0, the other half's, 1, and what steps before them gave."""
    silu = Step("logistic", 0, 0), Step("mul", 0, 2), Step("mul", 3, 1), Step("copy", 4)
    assert steps_of(silu_gate) == silu
    assert steps_of(lambda gate, up: gate) == (Step("copy", 0),)


@pytest.mark.parametrize(
    "activation",
    [
        lambda gate, up: jnp.tanh(gate) * up,
        lambda gate, up: gate - jnp.max(up),
        lambda gate, up: gate * up[::-1],
        lambda gate, up: gate * up.astype(jnp.bfloat16).astype(jnp.float32),
        lambda gate, up: jnp.where(gate > 0, gate, up),
        lambda gate, up: gate**3 * up,
        lambda gate, up: gate * np.arange(16, dtype=np.float32)[None] * up,
    ],
)
def test_activation_of_other_operations_is_no_program(activation):
    assert steps_of(activation) is None


@pytest.mark.parametrize("sizes", [{"experts": 8}, slow({"experts": 5, "choice": "same"})], ids=["any", "same"])
def test_tokens_result_does_not_depend_on_its_neighbours(sizes):
    """It stands in other slots, of other tiles, beside other rows, or beside none."""
    case = ExpertCase(name="bits", tokens=40, **SMALL, **sizes)
    inputs = build(case)
    x, weights, chosen, *experts = inputs.args
    among = mixed(inputs)
    for token in (17, 39):
        alone = np.full_like(chosen, -1)
        alone[20] = chosen[token]
        moved = x.at[20].set(x[token]), weights.at[20].set(weights[token]), jnp.asarray(alone)
        np.testing.assert_array_equal(mixed(inputs._replace(args=(*moved, *experts)))[20], among[token])


def test_routed_mixture_is_the_mixture_of_what_is_routed():
    case = ExpertCase(name="routed", tokens=9, biases=True, layers=2, **SMALL)
    inputs = build(case)
    routing = Routing(num_experts=case.experts, per_token=case.per_token, normalised=True)
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((case.tokens, case.experts)), jnp.float32)
    bias = jnp.arange(8.0) / 10
    inputs = route_choices(inputs, logits, routing, bias)
    x, _, _, *experts = inputs.args
    facts = {"weighs_inputs": inputs.kwargs.pop("weighs_inputs"), "implementation": "triton"}
    run = jax.jit(functools.partial(routed_experts, routing=routing, **facts))
    out = run(x, logits, gate_up=experts[0], down=experts[1], choice_bias=bias, **inputs.kwargs)
    assert_mixture(case, inputs, out)


def test_no_tokens_have_no_results():
    x, weights, chosen, *experts = build(CASES[0]).args
    out = mixture_of_experts(
        x[:0], weights[:0], chosen[:0], *experts, layer_index=jnp.int32(1), implementation="triton"
    )
    assert (out.shape, out.dtype) == ((0, 64), jnp.bfloat16)


QWEN3 = ExpertsCall(
    num_tokens=1,
    per_token=8,
    num_experts=128,
    hidden_size=2048,
    units=768,
    dtype="bfloat16",
    kernel_dtype="bfloat16",
    activation=silu_gate,
    device=Device("gpu", (9, 0)),
)


def test_calls_of_two_dtypes_are_refused():
    assert refuses(QWEN3) is None
    sentence = refuses(dataclasses.replace(QWEN3, kernel_dtype="float16"))
    assert sentence == "`triton` does not take bfloat16 tokens and float16 experts."


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("capability", SHARED_MEMORY, ids=lambda capability: "{}.{}".format(*capability))
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 2048, 16384])
@pytest.mark.parametrize(("experts", "per_token", "hidden", "units"), [(128, 8, 2048, 768), (8, 2, 4096, 14336)])
def test_tiles_fit_and_fill_a_gpu(capability, tokens, dtype, experts, per_token, hidden, units):
    facts = {"num_experts": experts, "per_token": per_token, "hidden_size": hidden, "units": units}
    device = Device("gpu", capability)
    call = dataclasses.replace(QWEN3, num_tokens=tokens, dtype=dtype, kernel_dtype=dtype, device=device, **facts)
    met = min(experts, tokens * per_token)
    for depth, columns in ((hidden, 2 * units), (units, hidden)):
        sizes = tile_sizes.product_tiles(call, depth=depth, columns=columns)
        bytes_of_stage = (sizes.block_rows + sizes.block_columns) * sizes.block_depth * jnp.dtype(dtype).itemsize
        assert sizes.stages >= 3
        assert sizes.stages * bytes_of_stage <= SHARED_MEMORY[capability]
        if sizes.block_rows <= 32:  # weights are streamed
            programs = met * -(-columns // sizes.block_columns) * sizes.splits
            assert programs >= num_sms(device) or sizes.splits == 8 or depth < 1024 * sizes.splits
