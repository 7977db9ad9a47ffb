"""Mixtures of rows that are added up first, where the products before them and after them have biases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jattn_kernels import Unnormed, added, matmul_splits, rms_norm, routed_experts, summed_and_normed, taken
from jattn_kernels.call import Device, ExpertsCall
from jattn_kernels.dispatch import register
from jattn_kernels.implementation import Implementation
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.splits import splits_of
from tests.kernels.test_attended_mixture import SMALL as ATTENDED
from tests.kernels.test_attended_mixture import attended_mixture, unattended, with_attention
from tests.kernels.test_attended_mixture import in_turn as attended_in_turn
from tests.kernels.test_experts_of_sum import LAYERS, SMALL, following, given, is_one_kernel, mixture, stack
from tests.often import often

BIASES = "output", "router", "next"


def with_output_bias(x, bias):
    *first, last = x.additions
    return dataclasses.replace(x, additions=(*first, dataclasses.replace(last, bias=bias)))


def biased(sizes, dtype="bfloat16", *, has=BIASES) -> tuple[Any, Any, Any, dict[str, Any]]:
    """As `given`; then the next product, and options of the mixture: with those biases, NaN in all but one layer."""
    x, kernels = given(sizes, dtype)
    columns = {"output": sizes.hidden, "router": sizes.experts, "next": 320}
    biases = {
        name: stack(30 + number, columns[name], size=1.0, dtype=dtype)
        for number, name in enumerate(BIASES)
        if name in has
    }
    x = with_output_bias(x, biases.get("output"))
    product = dataclasses.replace(following(sizes, dtype), bias=biases.get("next"))
    return x, kernels, product, {"router_bias": biases.get("router")}


def next_norm(out, total, product):
    facts = {"eps": product.eps, "offset": product.offset}
    return rms_norm(total + added(out), product.scale, layer_index=product.scale_layer, implementation="xla", **facts)


def in_turn(x, kernels, product, options, routing):
    """All one after the other, biases added to products that have none: the mixture, the sum, the next product."""
    (left, last), layer = x.additions, LAYERS - 1
    output = matmul_splits(last.rows, last.kernel, layer_index=layer, implementation="xla") + last.bias[layer][None]
    total = x.rows + added(left) + output
    normed = taken(dataclasses.replace(x, rows=total, additions=()), implementation="xla")
    facts = {"layer_index": layer, "implementation": "xla"}
    logits = matmul_splits(normed, kernels["router"], out_dtype=jnp.float32, **facts)
    logits += options["router_bias"][layer][None].astype(jnp.float32)
    out = routed_experts(normed, logits, routing, kernels["gate_up"], kernels["down"], **facts)
    after = matmul_splits(next_norm(out, total, product), product.kernel, **facts) + product.bias[layer][None]
    return out, total, after


def assert_close(own, expected, dtype):
    for mine, other in zip(own, expected, strict=True):
        wide = np.asarray(other, np.float64)
        atol = 8 * float(jnp.finfo(dtype).eps) * np.abs(wide).max()
        np.testing.assert_allclose(np.asarray(added(mine), np.float64), wide, rtol=0, atol=atol)


def next_of(out, total, product):
    """As a layer begins with it where the one before has left it."""
    facts = {"layer_index": product.scale_layer, "eps": product.eps, "offset": product.offset}
    x = Unnormed(rows=total, additions=(out,), scale=product.scale, **facts)
    options = {"layer_index": product.layer_index, "implementation": "xla"}
    return matmul_splits(x, product.kernel, bias=product.bias, **options)


@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_biases_are_added_to_each_product(monkeypatch, implementation):
    routing, dtype = SMALL.routing(scoring="softmax_of_chosen"), "bfloat16"
    x, kernels, product, options = biased(SMALL, dtype)
    expected = jax.jit(functools.partial(in_turn, routing=routing))(x, kernels, product, options)
    run = functools.partial(mixture, routing=routing, implementation=implementation)
    if implementation is None:
        out, total, after = jax.jit(run)(x, kernels, following=product, **options)
    else:
        monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 34))
        with interpreted():
            out, total, after = jax.jit(run)(x, kernels, following=product, **options)
    after = next_of(out, total, product) if after is None else after
    assert_close((out, total, after), expected, dtype)


def whole(call, operands):
    """What a kernel that does it all would return, of what it is given alone."""
    given, layer, after = operands.router, operands.layer_index, operands.router.next
    biases = given.output_bias, given.bias, after.bias
    called = call.router.output_biased, call.router.biased, call.router.next.biased
    assert called == tuple(bias is not None for bias in biases)

    def product(rows, kernel, bias, layer, **options):
        return added(matmul_splits(rows, kernel, bias=bias, layer_index=layer, implementation="xla", **options))

    output = product(given.attended, given.output, given.output_bias, given.output_layer)
    norm, facts = given.norm, {"eps": call.router.norm.eps, "offset": call.router.norm.offset}
    additions = (*norm.additions, output)
    rows = Unnormed(rows=norm.x, additions=additions, scale=norm.scale, layer_index=norm.layer_index, **facts)
    (total, _), normed = summed_and_normed(rows, implementation="xla"), taken(rows, implementation="xla")
    logits = product(normed, given.kernel, given.bias, layer, out_dtype=jnp.float32)
    experts = operands.gate_up, operands.down
    out = added(routed_experts(normed, logits, call.routing, *experts, layer_index=layer, implementation="xla"))
    facts = {"eps": call.router.next.norm.eps, "offset": call.router.next.norm.offset}
    normed = rms_norm(total + out, after.scale, layer_index=after.scale_layer, implementation="xla", **facts)
    return out, total, splits_of(product(normed, after.kernel, after.bias, after.layer)), None


@pytest.mark.parametrize(
    "has", often([BIASES, (), *((name,) for name in BIASES)], [BIASES]), ids=lambda has: "-".join(has) or "none"
)
def test_one_kernel_is_given_each_bias(has):
    routing = SMALL.routing()
    x, kernels, product, options = biased(SMALL, has=has)

    def refuses(call):
        return None if isinstance(call, ExpertsCall) and call.router is not None else "`whole` does nothing else."

    with register(Implementation(name="whole", refuses=refuses, run=whole), before="mosaic"):
        out, total, after = mixture(x, kernels, product, routing=routing, **options)
    zeros = {"output": SMALL.hidden, "router": SMALL.experts, "next": 320}
    absent = {name: jnp.zeros((LAYERS, width), x.dtype) for name, width in zeros.items() if name not in has}
    x = with_output_bias(x, absent.get("output", x.additions[-1].bias))
    product = dataclasses.replace(product, bias=absent.get("next", product.bias))
    options["router_bias"] = absent.get("router", options["router_bias"])
    assert_close((out, total, after), in_turn(x, kernels, product, options, routing), x.dtype)


def test_a_bias_stays_with_a_product_of_rows_that_are_not_attended():
    rows, routing = unattended(ATTENDED, 100), ATTENDED.routing()
    x, kernels, product, options = biased(ATTENDED)
    run = jax.jit(functools.partial(attended_mixture, routing=routing))
    out, total, after, _ = run(with_attention(x, rows), kernels, following=product, **options)
    assert after is None
    attended, _ = attended_in_turn(rows)
    expected = jax.jit(functools.partial(in_turn, routing=routing))
    x = with_attention(x, attended)
    assert_close((out, total), expected(x, kernels, product, options)[:2], x.dtype)


@pytest.mark.parametrize("has", often([BIASES, *((name,) for name in BIASES)], [BIASES]), ids="-".join)
def test_mosaics_kernel_takes_each_bias(monkeypatch, has):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x, kernels, product, options = jax.eval_shape(functools.partial(biased, SMALL, has=has))

    def run(x, kernels, product, options):
        return mixture(x, kernels, product, routing=SMALL.routing(), **options)

    assert is_one_kernel(run, x, kernels, product, options)
    assert jax.eval_shape(run, x, kernels, product, options)[2] is not None


@pytest.mark.gpu
def test_biases_are_added_to_each_product_on_a_gpu():
    routing, dtype = SMALL.routing(scoring="softmax_of_chosen"), "bfloat16"
    x, kernels, product, options = biased(SMALL, dtype)
    expected = jax.jit(functools.partial(in_turn, routing=routing))(x, kernels, product, options)
    run = functools.partial(mixture, routing=routing, implementation="mosaic")
    assert_close(jax.jit(run)(x, kernels, following=product, **options), expected, dtype)


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("shape", [(LAYERS, 7), (SMALL.hidden,)])
def test_a_bias_of_another_shape_is_refused(monkeypatch, name, shape):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it would be first to see the shape
    x, kernels, product, options = jax.eval_shape(functools.partial(biased, SMALL))
    wrong = jax.ShapeDtypeStruct(shape, x.dtype)
    if name == "output":
        x = with_output_bias(x, wrong)
    elif name == "router":
        options["router_bias"] = wrong
    else:
        product = dataclasses.replace(product, bias=wrong)
    with pytest.raises(ValueError, match=r"`bias` must be \[2, \d+\], as `kernel` is"):
        jax.eval_shape(functools.partial(mixture, routing=SMALL.routing()), x, kernels, product, **options)
