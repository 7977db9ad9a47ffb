"""One token's mixture in mxfp4 of rows that are added up first, with the products before and after it: one kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import (
    NextProduct,
    Routing,
    Splits,
    Unmultiplied,
    Unnormed,
    added,
    matmul_splits,
    multiplied,
    routed_experts_of_sum,
    summed_and_normed,
)
from jattn_kernels.call import Device
from jattn_kernels.lowering.routing import routed
from tests.kernels.harness.expert_cases import ExpertInputs, clamped_swiglu
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import assert_product_of_normed, unnormed
from tests.kernels.test_few_bits_experts import assert_near, in_few_bits
from tests.often import slow

LAYERS, EXPERTS, PER_TOKEN = 2, 32, 4
ROUTING = Routing(num_experts=EXPERTS, per_token=PER_TOKEN, scoring="softmax_of_chosen")


def of_last_layer(key, *shape, size=1.0):
    """NaN in all layers but the last."""
    numbers = (jax.random.normal(jax.random.key(key), shape) * size).astype(jnp.bfloat16)
    return jnp.stack([jnp.full_like(numbers, jnp.nan), numbers])


def given(width, attended, columns, *, biased=True):
    """The token, all weights, and the product that follows."""
    rng = np.random.default_rng(0)
    x, more, rows = (
        jax.random.normal(jax.random.key(key), (1, size)) for key, size in ((5, width), (6, width), (7, attended))
    )
    parts = jnp.stack([more * share for share in (0.5, *[0.1] * 5)])
    left = Splits(parts=jnp.pad(parts, ((0, 0), (0, 3), (0, 0))), num_rows=1, dtype=jnp.dtype(jnp.bfloat16))
    bias = of_last_layer if biased else lambda *_: None
    product = Unmultiplied(
        rows=rows.astype(jnp.bfloat16),
        kernel=of_last_layer(4, attended, width, size=attended**-0.5),
        bias=bias(8, width),
        layer_index=LAYERS - 1,
    )
    x = dataclasses.replace(unnormed(x.astype(jnp.bfloat16)), additions=(left, product))
    scale = unnormed(jnp.zeros((1, width), jnp.bfloat16)).scale
    following = NextProduct(
        scale=scale,
        scale_layer=2,
        kernel=of_last_layer(9, width, columns, size=width**-0.5),
        bias=bias(10, columns),
        layer_index=LAYERS - 1,
        eps=1e-5,
        offset=0.5,
    )
    options = {
        "router": of_last_layer(1, width, EXPERTS, size=width**-0.5 * 2),
        "gate_up": in_few_bits("mxfp4", (LAYERS, EXPERTS, 2 * width, width), rng),
        "down": in_few_bits("mxfp4", (LAYERS, EXPERTS, width, width), rng),
    }
    if biased:
        options |= {"router_bias": bias(11, EXPERTS), "gate_up_bias": bias(12, EXPERTS, 2 * width)}
        options["down_bias"] = bias(13, EXPERTS, width)
    return x, options, following


def mixture(x, options, following=None, **more):
    facts = {"routing": ROUTING, "activation": clamped_swiglu, "layer_index": LAYERS - 1, "following": following}
    *made, pages = routed_experts_of_sum(x, **options, **facts, **more)
    assert pages is None
    return made


def assert_mixture(out, total, x, options):
    rows = np.asarray(x.rows, np.float64)
    for addition in x.additions:
        rows = rows + np.asarray(added(multiplied(addition, implementation="xla")), np.float64)
    eps = float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(np.asarray(total, np.float64), rows, rtol=0, atol=4 * eps * np.abs(rows).max())
    own = dataclasses.replace(x, rows=total, additions=())
    normed = summed_and_normed(own, implementation="xla")[1]
    facts = {"layer_index": LAYERS - 1, "out_dtype": jnp.float32, "implementation": "xla"}
    logits = matmul_splits(own, options["router"], bias=options.get("router_bias"), **facts)
    kernels = options["gate_up"], options["down"]
    given = {name: bias for name, bias in options.items() if name in ("gate_up_bias", "down_bias")}
    given |= {"activation": clamped_swiglu, "layer_index": jnp.int32(LAYERS - 1)}
    assert_near(added(out), ExpertInputs((normed, *routed(added(logits), ROUTING, None), *kernels), given))
    assert np.all(np.asarray(out.parts[:, 1:]) == 0), "what the next layer's blocks leave each other numbers in"


def assert_next_product(product, out, total, following):
    facts = {"scale": following.scale, "layer_index": following.scale_layer}
    rows = Unnormed(rows=total + added(out), eps=following.eps, offset=following.offset, **facts)
    bias = 0.0 if following.bias is None else following.bias[following.layer_index].astype(jnp.float32)
    assert np.all(np.asarray(product.parts[:, 1:]) == 0)
    without = dataclasses.replace(product, parts=product.parts.at[0, 0].add(-bias), dtype=jnp.dtype(jnp.float32))
    assert_product_of_normed(without, rows, following.kernel[following.layer_index])


def is_one_kernel(run, *args):
    return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1


# A row that is no multiple of a stage; every block of columns has a block of the grid.
SMALL = {"width": 1344, "attended": 256, "columns": 320}


@pytest.mark.parametrize("biased", [True, slow(False)])
def test_one_tokens_mixture_agrees_with_the_oracle(monkeypatch, biased):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 22))
    x, options, following = given(**SMALL, biased=biased)
    with interpreted():
        run = jax.jit(functools.partial(mixture, implementation="mosaic"))
        out, total, product = run(x, options, following)
    assert_mixture(out, total, x, options)
    assert_next_product(product, out, total, following)


# test_step_kernels lowers it in a whole step.
@pytest.mark.slow
@pytest.mark.parametrize("is_last", [False, True])
def test_it_is_one_kernel(monkeypatch, is_last):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x, options, following = jax.eval_shape(lambda: given(width=2880, attended=4096, columns=5120))
    assert is_one_kernel(mixture, x, options, None if is_last else following)


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [True, False])
def test_one_tokens_mixture_on_a_gpu(biased):
    x, options, following = given(width=2880, attended=4096, columns=5120, biased=biased)
    run = jax.jit(mixture)
    assert is_one_kernel(mixture, x, options, following)
    out, total, product = run(x, options, following)
    assert_mixture(out, total, x, options)
    assert_next_product(product, out, total, following)
    for number in range(200):
        again, own_total, own = run(x, options, following)
        np.testing.assert_array_equal(own_total, total, f"run {number}")
        np.testing.assert_array_equal(again.parts, out.parts, f"run {number}")
        np.testing.assert_array_equal(own.parts, product.parts, f"run {number}")
