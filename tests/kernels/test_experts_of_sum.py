"""Mixtures of rows that are added up first, whose router is part of them: one kernel of one token on Hopper."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

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
    matmul_splits_of_sum,
    multiplied,
    route,
    routed_experts,
    routed_experts_of_sum,
    summed_and_normed,
)
from jattn_kernels.call import Device
from jattn_kernels.mosaic.sm90.experts.one_token_shared import SharedUnits
from tests.kernels.harness.copy_places import misplaced_copies
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import assert_product_of_normed, unnormed
from tests.often import slow

LAYERS = 2


class Sizes(NamedTuple):
    """Of a layer."""

    hidden: int
    attended: int
    units: int
    experts: int
    per_token: int
    shared: int = 0

    @property
    def choices(self) -> int:
        return self.per_token + self.shared

    def routing(self, **facts) -> Routing:
        return Routing(num_experts=self.experts, per_token=self.per_token, shared=self.shared, **facts)


SMALL, LARGE = Sizes(1024, 256, 128, 64, 4), Sizes(2048, 4096, 768, 128, 8)
UNEVEN = Sizes(1152, 640, 256, 64, 3)
# DeepSeek-V2-Lite's: a block's columns of what experts return are of one expert.
LITE = Sizes(2048, 2048, 1408, 64, 6, shared=2)


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU of as few SMs as there are blocks of columns, or a few more."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 34))


@pytest.fixture
def larger_hopper(monkeypatch):
    """Likewise, of enough SMs for a block of columns each of what four experts return."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 68))


def stack(key, *shape, size, dtype):
    """Weights of all layers, NaN in all but the last: a prime count of numbers in turn, as more take seconds."""
    numbers = (jax.random.normal(jax.random.key(key), (1_000_003,)) * size).astype(dtype)
    count = math.prod(shape)
    last = jnp.tile(numbers, -(-count // numbers.size))[:count].reshape(1, *shape)
    return jnp.concatenate([jnp.full((LAYERS - 1, *shape), jnp.nan, dtype), last])


def given(sizes, dtype="bfloat16", rows=1, *, left_rows=13):
    """The token and all weights; what is added to it last is not multiplied yet."""
    weights = functools.partial(stack, dtype=dtype)
    kernels = {
        "router": weights(1, sizes.hidden, sizes.experts, size=sizes.hidden**-0.5 * 2),
        "gate_up": weights(2, sizes.experts + sizes.shared, sizes.hidden, 2 * sizes.units, size=sizes.hidden**-0.5),
        "down": weights(3, sizes.experts + sizes.shared, sizes.units, sizes.hidden, size=sizes.units**-0.5),
    }
    output = weights(4, sizes.attended, sizes.hidden, size=sizes.attended**-0.5)
    x, more, attended = (
        jax.random.normal(jax.random.key(key), (rows, width))
        for key, width in ((5, sizes.hidden), (6, sizes.hidden), (7, sizes.attended))
    )
    shares = [0.5, *[0.5 / (sizes.choices - 1)] * (sizes.choices - 1)]
    parts = jnp.pad(jnp.stack([more * share for share in shares]), ((0, 0), (0, left_rows - rows), (0, 0)))
    left = Splits(parts=parts, num_rows=rows, dtype=jnp.dtype(dtype))
    product = Unmultiplied(rows=attended.astype(dtype), kernel=output, layer_index=LAYERS - 1)
    return dataclasses.replace(unnormed(x.astype(dtype)), additions=(left, product)), kernels


def following(sizes, dtype="bfloat16", columns=320):
    """The next layer's norm and product; NaN in all layers but the last."""
    scale = unnormed(jnp.zeros((1, sizes.hidden), dtype)).scale
    kernel = stack(9, sizes.hidden, columns, size=sizes.hidden**-0.5, dtype=dtype)
    return NextProduct(scale=scale, scale_layer=2, kernel=kernel, layer_index=LAYERS - 1, eps=1e-5, offset=0.5)


def mixture(x, kernels, following=None, *, routing, **options):
    facts = {"routing": routing, "layer_index": LAYERS - 1, "following": following}
    *made, pages = routed_experts_of_sum(x, **facts, **kernels, **options)
    assert pages is None
    return made


def in_turn(x, kernels, routing, **options):
    """The same by a kernel, or several, for each."""
    x = dataclasses.replace(x, additions=tuple(multiplied(addition) for addition in x.additions))
    router, (gate_up, down) = kernels["router"], (kernels[name] for name in ("gate_up", "down"))
    facts: Any = {"layer_index": LAYERS - 1}
    logits, total, normed = matmul_splits_of_sum(x, router, out_dtype=jnp.float32, **facts)
    return routed_experts(normed, logits, routing, gate_up, down, in_splits=True, **facts, **options), total, normed


def next_in_turn(out, total, product):
    norm = Unnormed(
        rows=total,
        additions=(out,),
        scale=product.scale,
        layer_index=product.scale_layer,
        eps=product.eps,
        offset=product.offset,
    )
    return matmul_splits(norm, product.kernel, layer_index=product.layer_index)


def test_products_are_not_added_where_none_is_taken():
    x, kernels = given(SMALL)
    with pytest.raises(ValueError, match=r"may not be Unmultiplied\. Give `multiplied` of it"):
        matmul_splits_of_sum(x, kernels["router"][-1])


def is_one_kernel(run, *args):
    return lowers_to_one_kernel(jax.jit(run).trace(*args))


def lowers_to_one_kernel(traced):
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1


def assert_mixture_of_sum(out, total, x, kernels, routing, bias=None):
    """Against numbers in float64 from the sum on, which is x's to a last place of each addition."""
    eps = float(jnp.finfo(x.dtype).eps)
    rows = np.asarray(x.rows, np.float64)
    for addition in x.additions:
        rows = rows + np.asarray(added(multiplied(addition, implementation="xla")), np.float64)
    np.testing.assert_allclose(np.asarray(total, np.float64), rows, rtol=0, atol=4 * eps * np.abs(rows).max())
    normed = summed_and_normed(dataclasses.replace(x, rows=total, additions=()), implementation="xla")[1]
    router, gate_up, down = (np.asarray(kernels[name])[-1] for name in ("router", "gate_up", "down"))
    logits = np.asarray(normed, np.float64) @ router.astype(np.float64)
    weights, chosen = route(jnp.asarray(logits, jnp.float32), routing, bias=bias)
    expected, size = np.zeros(rows.shape), 0.0
    for weight, expert in zip(np.asarray(weights)[0], np.asarray(chosen)[0], strict=True):
        gate, up = np.split(np.asarray(normed, np.float64) @ gate_up[expert].astype(np.float64), 2, axis=-1)
        returned = (gate / (1 + np.exp(-gate)) * up) @ down[expert].astype(np.float64) * weight
        expected, size = expected + returned, size + np.abs(returned).max()
    np.testing.assert_allclose(np.asarray(added(out), np.float64), expected, rtol=0, atol=8 * eps * size)
    assert np.all(np.asarray(out.parts[:, 1:]) == 0), "what the next layer's blocks leave each other numbers in"


def assert_next_product(product, out, total, given):
    """Of the norm of what both layers add up to; its other rows are 0."""
    facts = {"scale": given.scale, "layer_index": given.scale_layer, "eps": given.eps, "offset": given.offset}
    assert_product_of_normed(product, Unnormed(rows=total + added(out), **facts), given.kernel[given.layer_index])
    assert np.all(np.asarray(product.parts[:, 1:]) == 0)


# Of the default tests, the one below asserts the same of more SMs and shared experts, test_biased_mixture_of_sum of
# these sizes with biases, and test_attended_mixture with attention before it.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dtype", "scoring", "biased"),
    [
        (SMALL, "bfloat16", "softmax", False),
        (SMALL._replace(experts=128), "bfloat16", "softmax_of_chosen", False),
        (SMALL._replace(per_token=2, shared=2), "bfloat16", "softmax", False),
        (UNEVEN, "float16", "sigmoid", True),
    ],
)
def test_one_tokens_mixture_of_a_sum_agrees_with_float64(hopper, sizes, dtype, scoring, biased):
    x, kernels = given(sizes, dtype)
    routing = sizes.routing(scoring=scoring)
    bias = jax.random.normal(jax.random.key(8), (sizes.experts,)) if biased else None
    product = following(sizes, dtype)
    with interpreted():
        run = functools.partial(mixture, routing=routing, choice_bias=bias, implementation="mosaic")
        out, total, after = jax.jit(run)(x, kernels, following=product)
    assert_mixture_of_sum(out, total, x, kernels, routing, bias)
    assert_next_product(after, out, total, product)


@pytest.mark.parametrize("shared", [1, slow(2)])
def test_blocks_share_the_depth_of_experts_that_are_not_chosen(larger_hopper, shared):
    sizes = SMALL._replace(per_token=4 - shared, shared=shared)
    x, kernels = given(sizes)
    product = following(sizes)
    with interpreted():
        run = functools.partial(mixture, routing=sizes.routing(), implementation="mosaic")
        out, total, after = jax.jit(run)(x, kernels, following=product)
    assert_mixture_of_sum(out, total, x, kernels, sizes.routing(), None)
    assert_next_product(after, out, total, product)


@pytest.mark.parametrize(
    ("experts", "units", "depth", "rows", "shares"),
    [
        (2, 1408, 2048, 10, 3),
        (1, 1536, 2048, 10, 5),
        (2, 1408, 2048, 1, 1),
        (3, 4096, 2048, 10, 1),
        (1, 64, 256, 10, 2),
    ],
)
def test_shares_are_as_many_as_there_is_room_for(monkeypatch, experts, units, depth, rows, shares):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    found = SharedUnits.of_a_share_each(experts, units, depth, SharedUnits.most(rows))
    assert (found.shares, found.rows) == (shares, 1 if shares == 1 else 2 * shares)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "scoring", "biased"),
    [(SMALL, "softmax", False), (UNEVEN, "sigmoid", True), (LITE, "softmax", False)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_tokens_mixture_of_a_sum_agrees_with_float64_on_a_gpu(sizes, scoring, biased, dtype):
    x, kernels = given(sizes, dtype)
    routing = sizes.routing(scoring=scoring)
    bias = jax.random.normal(jax.random.key(8), (sizes.experts,)) if biased else None
    product = following(sizes, dtype)
    run = functools.partial(mixture, routing=routing, choice_bias=bias, following=product)
    assert is_one_kernel(run, x, kernels)
    out, total, after = jax.jit(run)(x, kernels)
    assert_mixture_of_sum(out, total, x, kernels, routing, bias)
    assert_next_product(after, out, total, product)
    alone, own_total, none = jax.jit(functools.partial(mixture, routing=routing, choice_bias=bias))(x, kernels)
    np.testing.assert_array_equal(alone.parts, out.parts)
    np.testing.assert_array_equal(own_total, total)
    assert none is None


@pytest.mark.gpu
def test_one_tokens_mixture_of_a_sum_has_the_bits_of_its_parts_in_turn():
    x, kernels = given(LARGE)
    routing = LARGE.routing(normalised=True)
    product = following(LARGE, columns=5120)
    run = jax.jit(functools.partial(mixture, routing=routing))
    expected, total, _ = jax.jit(functools.partial(in_turn, routing=routing))(x, kernels)
    next_expected = jax.jit(next_in_turn)(expected, total, product)
    assert_bits_of_200_runs(run, x, kernels, product, (expected, total, next_expected))


@pytest.mark.gpu
def test_one_tokens_mixture_with_shared_experts_has_the_same_bits_again():
    x, kernels = given(LITE)
    product = following(LITE, columns=3648)
    run = jax.jit(functools.partial(mixture, routing=LITE.routing()))
    assert_bits_of_200_runs(run, x, kernels, product, run(x, kernels, following=product))


def assert_bits_of_200_runs(run, x, kernels, product, expected):
    out, total, after = expected
    for number in range(200):
        own, own_total, own_after = run(x, kernels, following=product)
        np.testing.assert_array_equal(own_total, total, f"run {number}")
        np.testing.assert_array_equal(own.parts, out.parts, f"run {number}")
        np.testing.assert_array_equal(own_after.parts, after.parts, f"run {number}")


@pytest.mark.parametrize(("sizes", "columns"), [(LARGE, 5120), (LITE, 3648)])
def test_one_tokens_mixture_of_a_sum_is_one_kernel(monkeypatch, sizes, columns):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x, kernels = jax.eval_shape(functools.partial(given, sizes))
    run = functools.partial(mixture, routing=sizes.routing(normalised=sizes is LARGE))
    for product in (None, jax.eval_shape(lambda: following(sizes, columns=columns))):
        traced = jax.jit(run).trace(x, kernels, product)
        assert misplaced_copies(traced.jaxpr.jaxpr)[1] == []
        assert lowers_to_one_kernel(traced)


@pytest.mark.parametrize(
    "change",
    [
        {"left_rows": 1},
        {"sizes": SMALL._replace(experts=96)},
        {"sizes": SMALL._replace(attended=192)},
        {"sizes": SMALL._replace(hidden=2560)},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_does_not_fit_the_kernel_is_taken_in_turn(hopper, change):
    x, kernels = jax.eval_shape(lambda: given(**{"sizes": SMALL, **change}))
    routing = Routing(num_experts=kernels["router"].shape[-1], per_token=2)
    traced = str(jax.make_jaxpr(functools.partial(mixture, routing=routing))(x, kernels))
    assert "skinny_matmul" in traced


def test_a_router_of_another_dtype_is_refused(hopper):
    x, kernels = jax.eval_shape(functools.partial(given, SMALL))
    kernels["router"] = jax.ShapeDtypeStruct(kernels["router"].shape, "float32")
    routing = Routing(num_experts=SMALL.experts, per_token=SMALL.per_token)
    with pytest.raises(ValueError, match="`kernel`"):
        jax.eval_shape(functools.partial(mixture, routing=routing), x, kernels)


def test_a_following_product_of_another_depth_is_refused(hopper):
    x, kernels = jax.eval_shape(functools.partial(given, SMALL))
    product = jax.eval_shape(lambda: following(SMALL._replace(hidden=512)))
    routing = Routing(num_experts=SMALL.experts, per_token=SMALL.per_token)
    with pytest.raises(ValueError, match="column for each row of `kernel`"):
        jax.eval_shape(functools.partial(mixture, routing=routing), x, kernels, product)
