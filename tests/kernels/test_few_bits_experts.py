"""Hopper's mixtures with weights in fp8 and mxfp4: under the interpreter against the oracle, lowered, and on a GPU."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import QuantizedKernel, are_multiplied_by_a_kernel, mixture_of_experts, reference
from jattn_kernels.call import Device
from jattn_kernels.mosaic.sm90.experts import entry, tile_sizes
from jattn_kernels.mosaic.sm90.experts.few_rows import few_rows_product
from tests.kernels.harness.copy_places import misplaced_copies
from tests.kernels.harness.expert_cases import ExpertCase, ExpertInputs, build
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.short_rows import take_short_rows
from tests.often import often, slow

STATIC = ("activation", "weighs_inputs", "implementation")
# Of an output's size. Hidden units and results are rounded to bfloat16, and by `xla` the weights to the rows' dtype; a
# GPU's tensor cores keep some 13 bits of a sum of 128 products.
OF_THE_WHOLE, OF_A_NUMBER = 6e-3, 2.0**-5


def in_few_bits(kind, shape, rng):
    """Random weights [..., outputs, inputs] of size 1 / sqrt(inputs), all layers but the last of NaN scales, or 0s."""
    *stack, outputs, inputs = shape
    size = 1 / math.sqrt(inputs)
    if kind == "mxfp4":
        scales = rng.integers(-2, 3, (*stack, inputs // 32, outputs)) + 127 + round(math.log2(size / 2.9))
        scales[..., ::7, ::5] -= 100  # next to nothing
        values = jnp.asarray(rng.integers(0, 256, (*stack, outputs, inputs // 2)), jnp.uint8)
        return QuantizedKernel(values=values, scales=jnp.asarray(scales, jnp.uint8))
    block = {"channel": (1, inputs), "block": (64, 128)}[kind]
    values = jnp.asarray(np.clip(rng.standard_normal(shape) * 100, -448, 448), jnp.float8_e4m3fn)
    of_blocks = (*stack, outputs // block[0], inputs // block[1])
    scales = size / 100 * np.exp2(rng.integers(-3, 4, of_blocks)) * rng.uniform(0.7, 1.4, of_blocks)
    if len(stack) > 1:
        scales[:-1] = np.nan
    return QuantizedKernel(values=values, scales=jnp.asarray(scales, jnp.float32))


def quantised(case, kind):
    """A case's inputs with its experts in few bits."""
    inputs, rng = build(case), np.random.default_rng(1)
    stack = () if case.layers is None else (case.layers,)
    shapes = (2 * case.units, case.hidden), (case.hidden, case.units)
    kernels = [in_few_bits(kind, (*stack, case.experts, *shape), rng) for shape in shapes]
    return ExpertInputs((*inputs.args[:3], *kernels), inputs.kwargs)


def expected(inputs):
    *args, gate_up, down = inputs.args
    scales = {"gate_up_scales": gate_up.scales, "down_scales": down.scales}
    return reference.mixture_of_experts(*args, gate_up.values, down.values, **scales, **inputs.kwargs)


def assert_near(out, inputs):
    """Of exact weights and rows that are not rounded."""
    exact, out = expected(inputs), np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    size = np.linalg.norm(exact, axis=1)
    np.testing.assert_array_equal(out[size == 0], 0)
    assert np.linalg.norm(out - exact) <= OF_THE_WHOLE * np.linalg.norm(exact)
    typical = size[:, None] / math.sqrt(exact.shape[1])
    assert np.all(np.abs(out - exact) <= OF_A_NUMBER * (np.abs(exact) + typical))


def mixed(inputs, implementation="mosaic"):
    run = jax.jit(functools.partial(mixture_of_experts, implementation=implementation), static_argnames=STATIC)
    return run(*inputs.args, **inputs.kwargs)


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU of two SMs; the interpreter is it, and slow."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 2))
    with interpreted():
        yield


# A depth of 320 is two stages of four bits, and of 256 of eight.
INTERPRETED = [
    ("block", ExpertCase(name="block", tokens=3, hidden=256, units=128, biases=True, clamped=True, layers=2)),
    ("mxfp4", ExpertCase(name="mxfp4", tokens=7, per_token=3, biases=True, clamped=True, hidden=320, units=320)),
]
SLOW = [
    ("channel", ExpertCase(name="strays", tokens=9, choice="strays", units=128)),
    ("channel", ExpertCase(name="one_token", tokens=1, hidden=256, units=256, layers=2)),
    ("channel", ExpertCase(name="weighs_inputs", tokens=64, units=128, weighs_inputs=True)),
    ("channel", ExpertCase(name="groups_by_xla", tokens=300, per_token=1, units=128)),
    ("block", ExpertCase(name="same", tokens=70, per_token=1, units=128, choice="same")),
    ("mxfp4", ExpertCase(name="one_row", tokens=1, hidden=320, units=320, layers=2)),
    ("mxfp4", ExpertCase(name="same_4_bits", tokens=70, per_token=1, hidden=320, units=320, choice="same")),
]


@pytest.mark.parametrize(
    ("kind", "case"),
    [*INTERPRETED, *(slow(*each) for each in SLOW)],
    ids=lambda each: getattr(each, "name", each),
)
def test_kernels_agree_with_the_oracle(hopper, kind, case):
    inputs = quantised(case, kind)
    assert_near(mixed(inputs), inputs)


@pytest.fixture
def short_rows(hopper, monkeypatch):
    take_short_rows(monkeypatch)


FEW_TOKENS = [
    ExpertCase(name="split", tokens=1, per_token=1, hidden=320, units=320, layers=2, biases=True, clamped=True),
    ExpertCase(name="tiles_of_8", tokens=7, choice="same", hidden=320, units=320, biases=True),
    ExpertCase(name="strays", tokens=3, choice="strays", hidden=320, units=320),
    ExpertCase(name="weighs_inputs", tokens=2, per_token=1, hidden=320, units=320, weighs_inputs=True),
    ExpertCase(name="tiles_of_16", tokens=14, per_token=3, hidden=320, units=640, layers=2, biases=True, clamped=True),
    ExpertCase(name="twice_16", tokens=20, experts=4, per_token=1, hidden=320, units=320, choice="same"),
]
FEW_TOKENS_OFTEN = [case for case in FEW_TOKENS if case.name in ("split", "strays")]


@pytest.mark.parametrize("case", often(FEW_TOKENS, FEW_TOKENS_OFTEN), ids=lambda case: case.name)
def test_kernel_of_few_tokens_agrees_with_the_oracle(short_rows, monkeypatch, case):
    taken = []
    monkeypatch.setattr(
        entry, "few_rows_product", lambda *args, **facts: taken.append(1) or few_rows_product(*args, **facts)
    )
    inputs = quantised(case, "mxfp4")
    assert_near(mixed(inputs), inputs)
    assert len(taken) == 2


@pytest.mark.parametrize(("kind", "width"), [("channel", 128), slow("mxfp4", 320)], ids=str)
def test_tiles_of_prompts(hopper, monkeypatch, kind, width):
    monkeypatch.setattr(tile_sizes, "_ROWS_OF_PROMPTS", 1)
    case = ExpertCase(name="prompts", tokens=130, per_token=1, hidden=width, units=width, choice="same")
    inputs = quantised(case, kind)
    assert_near(mixed(inputs), inputs)


@pytest.mark.parametrize("kind", [slow("channel"), "block", "mxfp4"])
def test_xla_agrees_with_the_oracle(kind):
    inputs = quantised(ExpertCase(name="xla", tokens=70, hidden=256, units=128, layers=2, biases=True), kind)
    assert_near(mixed(inputs, "xla"), inputs)


def shapes_of(kind, experts, hidden, units):
    """Of a layer's experts, as arrays that are not made."""

    def kernel(outputs, inputs):
        scales = {"channel": (outputs, 1), "block": (outputs // 128, inputs // 128), "mxfp4": (inputs // 32, outputs)}
        dtypes = (jnp.uint8, jnp.uint8) if kind == "mxfp4" else (jnp.float8_e4m3fn, jnp.float32)
        shapes = (outputs, inputs // 2 if kind == "mxfp4" else inputs), scales[kind]
        parts = (jax.ShapeDtypeStruct((2, experts, *shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
        return QuantizedKernel(**dict(zip(("values", "scales"), parts, strict=True)))

    return kernel(2 * units, hidden), kernel(hidden, units)


QWEN3, GPT_OSS = (128, 2048, 768), (32, 2880, 2880)


@pytest.mark.parametrize(
    ("kind", "shapes", "tokens"),
    [
        ("channel", QWEN3, 64),
        ("mxfp4", GPT_OSS, 1),
        *(
            slow(kind, shapes, tokens)
            for tokens in (1, 8, 64, 256, 2048)
            for kind, shapes in (("channel", QWEN3), ("block", QWEN3), ("mxfp4", GPT_OSS))
        ),
    ],
)
def test_kernels_are_lowered_for_cuda_and_copy_no_weights(monkeypatch, kind, shapes, tokens):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x = jax.ShapeDtypeStruct((tokens, shapes[1]), jnp.bfloat16)
    choice = (jax.ShapeDtypeStruct((tokens, 4), dtype) for dtype in (jnp.float32, jnp.int32))
    run = functools.partial(mixture_of_experts, layer_index=jnp.int32(1), implementation="mosaic")
    text = jax.jit(run).trace(x, *choice, *shapes_of(kind, *shapes)).lower(lowering_platforms=("cuda",)).as_text()
    # Two products, the order of rows, and two that put rows into two terms, unless those of few rows make them float16.
    assert text.count("@mosaic_gpu_v2") == 3 + 2 * (kind != "mxfp4" or tokens > 64) - (tokens > 256)
    of_weights = [line for line in text.splitlines() if f"tensor<2x{shapes[0]}x" in line and "custom_call" not in line]
    assert not [line for line in of_weights if "slice" in line]


@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("hidden", [1600, 2240, 2880])  # of few tokens, stages of 5, 7 and 9 groups
def test_copies_begin_where_a_gpu_writes(monkeypatch, tokens, hidden):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16)
    choice = (jax.ShapeDtypeStruct((tokens, 4), dtype) for dtype in (jnp.float32, jnp.int32))
    run = functools.partial(mixture_of_experts, layer_index=jnp.int32(1), implementation="mosaic")
    traced = jax.jit(run).trace(x, *choice, *shapes_of("mxfp4", 32, hidden, hidden))
    count, misplaced = misplaced_copies(traced.jaxpr.jaxpr)
    assert count >= 4
    assert not misplaced


@pytest.mark.parametrize(
    ("kind", "shapes", "taken"),
    [
        ("channel", QWEN3, True),
        ("block", QWEN3, True),
        ("mxfp4", GPT_OSS, True),
        ("channel", GPT_OSS, False),
        ("mxfp4", (8, 96, 96), False),
    ],
)
def test_which_experts_a_kernel_takes(monkeypatch, kind, shapes, taken):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    gate_up, down = shapes_of(kind, *shapes)
    assert are_multiplied_by_a_kernel(gate_up, down, jnp.bfloat16) == taken
    assert not are_multiplied_by_a_kernel(gate_up, down, jnp.float16)
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("cpu"))
    assert not are_multiplied_by_a_kernel(gate_up, down, jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("channel", {"hidden": 2048, "units": 768, "experts": 16, "per_token": 4}),
        ("block", {"hidden": 2048, "units": 768, "experts": 16, "per_token": 4}),
        ("mxfp4", {"hidden": 2880, "units": 2880, "experts": 8, "per_token": 2, "biases": True, "clamped": True}),
        ("mxfp4", {"hidden": 512, "units": 192, "experts": 8, "choice": "same"}),
        ("channel", {"hidden": 256, "units": 384, "choice": "strays"}),
    ],
    ids=str,
)
def test_kernels_on_a_gpu(tokens, kind, sizes):
    inputs = quantised(ExpertCase(name="gpu", tokens=tokens, layers=2, **sizes), kind)
    assert_near(mixed(inputs), inputs)
