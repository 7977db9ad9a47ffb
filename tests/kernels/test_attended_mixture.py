"""Mixtures of one token whose attention is part of them: one kernel of a layer on Hopper."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, Routing, Unattended, multiplied, paged_decode
from jattn_kernels.call import Device
from tests.kernels.harness.copy_places import misplaced_copies
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.test_experts_of_sum import (
    LARGE,
    LAYERS,
    Sizes,
    assert_mixture_of_sum,
    assert_next_product,
    following,
    given,
    is_one_kernel,
    mixture,
)

SMALL = Sizes(1024, 2048, 128, 64, 8)
GROUP, WIDTH = 8, 128


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU of few SMs."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 34))


def unattended(sizes, seq_len, dtype="bfloat16", *, page_size=16, layout="NHD", max_keys=None):
    """Of one token; NaN wherever it has no key, in other layers too."""
    heads = sizes.attended // WIDTH
    spec = AttentionSpec(
        num_q_heads=heads, num_kv_heads=heads // GROUP, head_dim=WIDTH, page_layout=layout, sm_scale=0.1
    )
    pages = -(-(max_keys or seq_len + 40) // page_size)
    shape = (LAYERS, pages + 2, page_size, heads // GROUP, WIDTH)
    table = jax.random.permutation(jax.random.key(20), pages + 2)[:pages][None].astype(jnp.int32)
    owned = jnp.arange(pages * page_size).reshape(pages, page_size) < seq_len
    is_owned = jnp.zeros((pages + 2, page_size), bool).at[table[0]].set(owned)

    def filled(key):
        numbers = jnp.where(is_owned[:, :, None, None], jax.random.normal(jax.random.key(key), shape), jnp.nan)
        numbers = numbers.at[:-1].set(jnp.nan).astype(dtype)
        return numbers if layout == "NHD" else numbers.swapaxes(2, 3)

    return Unattended(
        q=jax.random.normal(jax.random.key(21), (1, heads, WIDTH)).astype(dtype),
        k_pages=filled(22),
        v_pages=filled(23),
        page_table=table,
        seq_lens=jnp.array([seq_len], jnp.int32),
        layer_index=LAYERS - 1,
        spec=spec,
    )


def with_attention(x, rows):
    *first, last = x.additions
    return dataclasses.replace(x, additions=(*first, dataclasses.replace(last, rows=rows)))


def attended(rows, implementation="xla"):
    """The same by a kernel of its own."""
    places = (rows.k_pages, rows.v_pages, rows.page_table, rows.seq_lens)
    facts = {"spec": rows.spec, "layer_index": rows.layer_index, "implementation": implementation}
    return paged_decode(rows.q[:, None], *places, **facts).reshape(rows.shape)


@pytest.mark.parametrize(
    ("seq_len", "page_size", "layout", "dtype"),
    [
        (300, 16, "NHD", "bfloat16"),
        pytest.param(1100, 64, "HND", "float16", marks=pytest.mark.slow),
        pytest.param(33, 128, "NHD", "bfloat16", marks=pytest.mark.slow),
        pytest.param(0, 8, "NHD", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_one_tokens_mixture_with_its_attention_agrees_with_float64(hopper, seq_len, page_size, layout, dtype):
    x, kernels = given(SMALL, dtype)
    rows = unattended(SMALL, seq_len, dtype, page_size=page_size, layout=layout)
    routing, product = Routing(num_experts=SMALL.experts, per_token=SMALL.per_token), following(SMALL, dtype)
    with interpreted():
        run = functools.partial(mixture, routing=routing, implementation="mosaic")
        out, total, after = jax.jit(run)(with_attention(x, rows), kernels, following=product)
    assert_mixture_of_sum(out, total, with_attention(x, attended(rows)), kernels, routing)
    assert_next_product(after, out, total, product)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("page_size", "layout"), [(16, "NHD"), (64, "HND"), (32, "NHD"), (8, "NHD"), (128, "NHD")])
def test_one_tokens_mixture_with_its_attention_agrees_with_float64_on_a_gpu(page_size, layout, dtype):
    x, kernels = given(LARGE, dtype)
    routing, product = Routing(num_experts=LARGE.experts, per_token=LARGE.per_token), following(LARGE, dtype)
    run = jax.jit(functools.partial(mixture, routing=routing, following=product))
    for seq_len in (0, 1, 64, 65, 500, 1024, 1030, 3500, 11000, 25000):
        rows = unattended(LARGE, seq_len, dtype, page_size=page_size, layout=layout, max_keys=25100)
        if seq_len == 0:
            assert is_one_kernel(run, with_attention(x, rows), kernels)
        out, total, after = run(with_attention(x, rows), kernels)
        assert_mixture_of_sum(out, total, with_attention(x, attended(rows)), kernels, routing)
        assert_next_product(after, out, total, product)


@pytest.mark.gpu
def test_one_tokens_mixture_with_its_attention_has_the_bits_of_its_parts_in_turn():
    """Of one tile of keys: more are not cut as decode's kernel cuts them. Then the same bits each time."""
    x, kernels = given(LARGE)
    routing = Routing(num_experts=LARGE.experts, per_token=LARGE.per_token, normalised=True)
    product = following(LARGE, columns=5120)
    run = jax.jit(functools.partial(mixture, routing=routing, following=product))
    for seq_len in (60, 1090, 5000):
        rows = unattended(LARGE, seq_len, max_keys=5100)
        expected = run(with_attention(x, attended(rows, "mosaic")), kernels)
        first = run(with_attention(x, rows), kernels)
        if seq_len <= 64:
            jax.tree.map(np.testing.assert_array_equal, first, expected)
        for _ in range(200):
            jax.tree.map(np.testing.assert_array_equal, run(with_attention(x, rows), kernels), first)


def test_one_tokens_mixture_with_its_attention_is_one_kernel(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x, kernels = jax.eval_shape(functools.partial(given, LARGE))
    rows = jax.eval_shape(functools.partial(unattended, LARGE, 1024))
    routing = Routing(num_experts=LARGE.experts, per_token=LARGE.per_token, normalised=True)
    run = functools.partial(mixture, routing=routing)
    for product in (None, jax.eval_shape(lambda: following(LARGE, columns=5120))):
        args = with_attention(x, rows), kernels, product
        assert misplaced_copies(jax.jit(run).trace(*args).jaxpr.jaxpr)[1] == []
        assert is_one_kernel(run, *args)


@pytest.mark.parametrize(
    "change",
    [{"window_left": 100}, {"logits_soft_cap": 30.0}, {"num_kv_heads": 4}, {"batch_invariant": True}],
    ids=lambda change: "-".join(change),
)
def test_attention_that_does_not_fit_the_kernel_is_computed_before_it(hopper, change):
    x, kernels = jax.eval_shape(functools.partial(given, SMALL))
    rows = jax.eval_shape(functools.partial(unattended, SMALL, 1024))
    spec = dataclasses.replace(rows.spec, **change)
    shape = (*rows.k_pages.shape[:3], spec.num_kv_heads, WIDTH)
    pages = jax.ShapeDtypeStruct(shape, rows.k_pages.dtype)
    rows = dataclasses.replace(rows, spec=spec, k_pages=pages, v_pages=pages)
    routing = Routing(num_experts=SMALL.experts, per_token=SMALL.per_token)
    traced = str(jax.make_jaxpr(functools.partial(mixture, routing=routing))(with_attention(x, rows), kernels))
    assert "paged_decode" in traced
    assert "skinny_matmul" not in traced


def test_a_product_of_attention_is_multiplied_once_it_is_computed():
    x, _ = given(SMALL)
    rows = unattended(SMALL, 100)
    product = dataclasses.replace(x.additions[-1], rows=rows)
    expected = multiplied(dataclasses.replace(product, rows=attended(rows)))
    np.testing.assert_array_equal(multiplied(product), expected)
