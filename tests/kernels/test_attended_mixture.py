"""Mixtures of one token whose attention is part of them: one kernel of a layer on Hopper."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, HeadNorms, Routing, Splits, Unattended, multiplied, routed_experts_of_sum
from jattn_kernels.call import Device
from jattn_kernels.spec import PageLayout
from jattn_kernels.unattended import attended
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
    lowers_to_one_kernel,
)
from tests.often import often_together, slow

SMALL, MEDIUM = Sizes(1024, 2048, 128, 64, 8), Sizes(2048, 4096, 128, 64, 8)
FEW_HEADS = SMALL._replace(attended=1024, per_token=4)
WIDTH = 128


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU of few SMs."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 34))


def unattended(
    sizes, seq_len, dtype="bfloat16", *, page_size=16, layout: PageLayout = "NHD", max_keys=None, group=8, **facts
):
    """Of one token; NaN wherever it has no key, in other layers too, and where its own will be."""
    heads, slot = sizes.attended // WIDTH, seq_len - 1
    kv_heads = heads // group
    spec = AttentionSpec(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=WIDTH, page_layout=layout, sm_scale=0.1, **facts
    )
    pages = -(-(max_keys or seq_len + 40) // page_size)
    shape = (LAYERS, pages + 2, page_size, kv_heads, WIDTH)
    table = jax.random.permutation(jax.random.key(20), pages + 2)[:pages][None].astype(jnp.int32)
    owned = jnp.arange(pages * page_size).reshape(pages, page_size) < slot
    is_owned = jnp.zeros((pages + 2, page_size), bool).at[table[0]].set(owned)

    def filled(key):
        numbers = jnp.where(is_owned[:, :, None, None], jax.random.normal(jax.random.key(key), shape), jnp.nan)
        numbers = numbers.at[:-1].set(jnp.nan).astype(dtype)
        return numbers if layout == "NHD" else numbers.swapaxes(2, 3)

    angles = jnp.linspace(0, 3, WIDTH // 2)[None]
    parts = jnp.pad(
        jax.random.normal(jax.random.key(21), (2, 1, heads + 2 * kv_heads, WIDTH)), ((0, 0), (0, 3)) + ((0, 0),) * 2
    )
    scales = [jax.random.normal(jax.random.key(key), (3, WIDTH)).astype(dtype) for key in (24, 25)]
    return Unattended(
        qkv=Splits(parts=parts, num_rows=1, dtype=jnp.dtype(dtype)),
        cos=jnp.cos(angles),
        sin=jnp.sin(angles),
        slots=jnp.where(slot < 0, -1, table[:, slot // page_size] * page_size + slot % page_size),
        norms=HeadNorms(q_scale=scales[0], k_scale=scales[1], layer_index=1, eps=1e-6),
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


def attended_mixture(x, kernels, following=None, *, routing, **options):
    facts = {"routing": routing, "layer_index": LAYERS - 1, "following": following}
    return routed_experts_of_sum(x, **facts, **kernels, **options)


def in_turn(rows, implementation="xla"):
    """Rows and pages by kernels of their own."""
    return attended(dataclasses.replace(rows, implementation=implementation))


@pytest.mark.parametrize(
    ("sizes", "seq_len", "page_size", "layout", "dtype", "group"),
    [
        (FEW_HEADS, 100, 16, "NHD", "bfloat16", 4),
        slow(SMALL, 100, 16, "NHD", "bfloat16", 8),
        slow(SMALL, 700, 64, "HND", "float16", 4),
        slow(SMALL, 64, 128, "NHD", "bfloat16", 8),
        slow(SMALL, 0, 8, "NHD", "bfloat16", 8),
    ],
)
def test_one_tokens_mixture_with_its_attention_agrees_with_float64(
    hopper, sizes, seq_len, page_size, layout, dtype, group
):
    x, kernels = given(sizes, dtype)
    rows = unattended(sizes, seq_len, dtype, page_size=page_size, layout=layout, group=group)
    routing, product = sizes.routing(), following(sizes, dtype)
    with interpreted():
        run = functools.partial(attended_mixture, routing=routing, implementation="mosaic")
        out, total, after, pages = jax.jit(run)(with_attention(x, rows), kernels, following=product)
    expected, expected_pages = in_turn(rows)
    assert_mixture_of_sum(out, total, with_attention(x, expected), kernels, routing)
    assert_next_product(after, out, total, product)
    for own, other in zip(pages, expected_pages, strict=True):
        np.testing.assert_allclose(own.astype("float32"), other.astype("float32"), rtol=0.02, atol=0.02)


def have_same_bits(one, other):
    """Whether NaN are of the same bits too, on the device."""

    def bits(x):
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    same = jax.tree.map(lambda a, b: jnp.array_equal(bits(a), bits(b)), one, other)
    return all(map(bool, jax.tree.leaves(same)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page_size", "layout", "dtype"),
    [(16, "NHD", "bfloat16"), (64, "HND", "float16"), (32, "NHD", "bfloat16"), (8, "HND", "bfloat16")],
)
def test_one_tokens_mixture_with_its_attention_agrees_with_float64_on_a_gpu(page_size, layout, dtype):
    x, kernels = given(MEDIUM, dtype)
    routing, product = Routing(num_experts=MEDIUM.experts, per_token=MEDIUM.per_token), following(MEDIUM, dtype)
    run = jax.jit(functools.partial(attended_mixture, routing=routing, following=product))
    apart = jax.jit(functools.partial(in_turn, implementation="mosaic"))
    for seq_len in (0, 1, 64, 65, 1024, 1030, 3500, 11000, 25000):
        rows = unattended(MEDIUM, seq_len, dtype, page_size=page_size, layout=layout, max_keys=25100)
        if seq_len == 0:
            assert is_one_kernel(run, with_attention(x, rows), kernels)
        out, total, after, pages = run(with_attention(x, rows), kernels)
        expected, expected_pages = apart(rows)
        assert_mixture_of_sum(out, total, with_attention(x, expected), kernels, routing)
        assert_next_product(after, out, total, product)
        assert have_same_bits(pages, expected_pages), f"pages, {seq_len} keys"


@pytest.mark.gpu
@pytest.mark.parametrize("seq_len", [60, 1090, 5000])
def test_one_tokens_mixture_with_its_attention_has_the_bits_of_its_parts_in_turn(seq_len):
    """Of one tile of keys: more are not cut as decode's kernel cuts them. Then the same bits each time."""
    x, kernels = given(LARGE)
    routing = Routing(num_experts=LARGE.experts, per_token=LARGE.per_token, normalised=True)
    product = following(LARGE, columns=5120)
    run = jax.jit(functools.partial(attended_mixture, routing=routing, following=product))
    rows = unattended(LARGE, seq_len, max_keys=5100)
    first = run(with_attention(x, rows), kernels)
    if seq_len <= 64:
        expected, pages = jax.jit(functools.partial(in_turn, implementation="mosaic"))(rows)
        in_parts = run(with_attention(x, expected), kernels)
        assert have_same_bits(first, (*in_parts[:3], pages))
    for number in range(200):
        assert have_same_bits(run(with_attention(x, rows), kernels), first), f"run {number}"


@pytest.mark.parametrize("columns", [5120, slow(None)])
def test_one_tokens_mixture_with_its_attention_is_one_kernel(monkeypatch, columns):
    """With the next layer's product, or as the last layer's."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x, kernels = jax.eval_shape(functools.partial(given, LARGE))
    rows = jax.eval_shape(functools.partial(unattended, LARGE, 1024))
    routing = Routing(num_experts=LARGE.experts, per_token=LARGE.per_token, normalised=True)
    run = functools.partial(attended_mixture, routing=routing)
    product = None if columns is None else jax.eval_shape(lambda: following(LARGE, columns=columns))
    args = with_attention(x, rows), kernels, product
    traced = jax.jit(run).trace(*args)
    assert misplaced_copies(traced.jaxpr.jaxpr)[1] == []
    assert lowers_to_one_kernel(traced)


UNFIT = [{"window_left": 100}, {"logits_soft_cap": 30.0}, {"group": 16}, {"batch_invariant": True}]


@pytest.mark.parametrize(
    ("change", "normed"),
    often_together(
        [(change, normed) for change in UNFIT for normed in (True, False)],
        [(UNFIT[0], True), (UNFIT[1], False), (UNFIT[2], False), (UNFIT[3], True)],
    ),
    ids=lambda value: str(value) if isinstance(value, bool) else "-".join(value),
)
def test_attention_that_does_not_fit_the_kernel_is_computed_before_it(monkeypatch, change, normed):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x, kernels = jax.eval_shape(functools.partial(given, LARGE))
    rows = jax.eval_shape(lambda: unattended(LARGE, 1024, **change))
    if not normed:
        rows = dataclasses.replace(rows, norms=None)
    routing = Routing(num_experts=LARGE.experts, per_token=LARGE.per_token)
    traced = str(jax.make_jaxpr(functools.partial(attended_mixture, routing=routing))(with_attention(x, rows), kernels))
    # Others are turned by the kernel that decodes.
    assert ("rotate_and_write" in traced) == (normed or "group" in change)
    assert "paged_decode" in traced
    assert "skinny_matmul" not in traced


def test_attention_by_another_implementation_is_computed_before_the_kernel(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x, kernels = jax.eval_shape(functools.partial(given, LARGE))
    rows = dataclasses.replace(jax.eval_shape(lambda: unattended(LARGE, 1024)), implementation="xla")
    routing = Routing(num_experts=LARGE.experts, per_token=LARGE.per_token)
    traced = str(jax.make_jaxpr(functools.partial(attended_mixture, routing=routing))(with_attention(x, rows), kernels))
    assert "rotate_and_write" not in traced
    assert "one_token_experts" in traced


def test_a_product_of_attention_that_is_not_computed_is_refused():
    x, _ = jax.eval_shape(functools.partial(given, SMALL))
    rows = jax.eval_shape(lambda: unattended(SMALL, 100))
    with pytest.raises(ValueError, match="Give `attended` of it"):
        multiplied(dataclasses.replace(x.additions[-1], rows=rows))
