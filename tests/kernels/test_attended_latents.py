"""Mixtures of one token whose attention over latent rows is part of them: one kernel of a layer on Hopper."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, UnattendedLatents, multiplied
from jattn_kernels.call import Device
from jattn_kernels.unattended_latents import attended_latents
from tests.kernels.harness.copy_places import misplaced_copies
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.test_attended_mixture import attended_mixture, have_same_bits, with_attention
from tests.kernels.test_experts_of_sum import (
    LAYERS,
    LITE,
    SMALL,
    assert_mixture_of_sum,
    assert_next_product,
    following,
    given,
    is_one_kernel,
    lowers_to_one_kernel,
)
from tests.often import slow

ROTARY, VALUE = 64, 128  # numbers of a row that turn; of a head's value
FEW = SMALL._replace(attended=1024)  # eight heads
WITH_SHARED = FEW._replace(per_token=3, shared=1)
LEFT_ROWS = {FEW: 20, WITH_SHARED: 20, LITE: 47}


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU of few SMs."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 34))


@pytest.fixture
def whole_hopper(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))


def unattended(sizes, seq_len, dtype="bfloat16", *, compressed=128, page_size=16, max_keys=None, **facts):
    """Of one token; NaN wherever it has no row, and in other layers too."""
    heads, width = sizes.attended // VALUE, compressed + ROTARY
    spec = AttentionSpec(
        num_q_heads=heads, num_kv_heads=1, head_dim=width, v_head_dim=compressed, sm_scale=width**-0.5, **facts
    )
    pages = -(-(max_keys or seq_len + 40) // page_size)
    table = jax.random.permutation(jax.random.key(20), pages + 2)[:pages][None].astype(jnp.int32)
    owned = jnp.arange(pages * page_size).reshape(pages, page_size) < seq_len
    is_owned = jnp.zeros((pages + 2, page_size), bool).at[table[0]].set(owned)
    rows = jax.random.normal(jax.random.key(22), (pages + 2, page_size, width))
    rows = jnp.where(is_owned[:, :, None], rows, jnp.nan).astype(dtype)
    latent_pages = jnp.full((LAYERS, *rows.shape), jnp.nan, dtype).at[-1].set(rows)
    q_nope, q_pe = (
        jax.random.normal(jax.random.key(key), (1, heads, size)).astype(dtype)
        for key, size in ((23, compressed), (24, ROTARY))
    )
    v_up = (jax.random.normal(jax.random.key(25), (heads, VALUE, compressed)) * compressed**-0.5).astype(dtype)
    return UnattendedLatents(
        q_nope=q_nope,
        q_pe=q_pe,
        latent_pages=latent_pages,
        page_table=table,
        seq_lens=jnp.array([seq_len], jnp.int32),
        layer_index=LAYERS - 1,
        v_up=jnp.full((3, *v_up.shape), jnp.nan, dtype).at[1].set(v_up),
        v_up_layer=1,
        spec=spec,
    )


def operands(sizes, dtype="bfloat16"):
    return given(sizes, dtype, left_rows=LEFT_ROWS[sizes])


def in_turn(rows, implementation="xla"):
    """Rows by kernels of their own."""
    return attended_latents(dataclasses.replace(rows, implementation=implementation))


@pytest.mark.parametrize(
    ("sizes", "seq_len", "page_size", "dtype"),
    [
        slow(FEW, 200, 16, "bfloat16"),
        (WITH_SHARED, 64, 64, "bfloat16"),
        slow(FEW, 2500, 32, "float16"),
        slow(FEW, 1, 128, "bfloat16"),
        slow(FEW, 0, 8, "bfloat16"),
    ],
)
def test_one_tokens_mixture_with_latent_attention_agrees_with_float64(hopper, sizes, seq_len, page_size, dtype):
    x, kernels = operands(sizes, dtype)
    rows = unattended(sizes, seq_len, dtype, page_size=page_size)
    routing, product = sizes.routing(), following(sizes, dtype)
    with interpreted():
        run = functools.partial(attended_mixture, routing=routing, implementation="mosaic")
        out, total, after, pages = jax.jit(run)(with_attention(x, rows), kernels, following=product)
    assert pages is None
    assert out.parts.shape[1] == LEFT_ROWS[sizes]
    assert np.all(np.asarray(out.parts[:, 1:]) == 0)
    assert_mixture_of_sum(out, total, with_attention(x, in_turn(rows)), kernels, routing)
    assert_next_product(after, out, total, product)


@pytest.mark.gpu
@pytest.mark.parametrize(("page_size", "dtype"), [(16, "bfloat16"), (64, "float16"), (128, "bfloat16")])
def test_one_tokens_mixture_with_latent_attention_agrees_with_float64_on_a_gpu(page_size, dtype):
    x, kernels = operands(LITE, dtype)
    routing, product = LITE.routing(), following(LITE, dtype)
    run = jax.jit(functools.partial(attended_mixture, routing=routing, following=product))
    for seq_len in (0, 1, 64, 65, 1024, 4096, 11000):
        rows = unattended(LITE, seq_len, dtype, compressed=512, page_size=page_size, max_keys=11100)
        if seq_len == 0:
            assert is_one_kernel(run, with_attention(x, rows), kernels)
        out, total, after, _ = run(with_attention(x, rows), kernels)
        assert_mixture_of_sum(out, total, with_attention(x, jax.jit(in_turn)(rows)), kernels, routing)
        assert_next_product(after, out, total, product)


@pytest.mark.gpu
def test_one_tokens_mixture_with_latent_attention_has_the_same_bits_again():
    x, kernels = operands(LITE)
    product = following(LITE, columns=3648)
    run = jax.jit(functools.partial(attended_mixture, routing=LITE.routing(), following=product))
    rows = unattended(LITE, 4000, compressed=512, page_size=64)
    first = run(with_attention(x, rows), kernels)
    for number in range(200):
        assert have_same_bits(run(with_attention(x, rows), kernels), first), f"run {number}"


@pytest.mark.parametrize("columns", [3648, slow(None)])
def test_one_tokens_mixture_with_latent_attention_is_one_kernel(whole_hopper, columns):
    """With the next layer's product, or as the last layer's."""
    x, kernels = jax.eval_shape(functools.partial(operands, LITE))
    rows = jax.eval_shape(functools.partial(unattended, LITE, 4096, compressed=512))
    run = functools.partial(attended_mixture, routing=LITE.routing())
    product = None if columns is None else jax.eval_shape(lambda: following(LITE, columns=columns))
    args = with_attention(x, rows), kernels, product
    traced = jax.jit(run).trace(*args)
    assert misplaced_copies(traced.jaxpr.jaxpr)[1] == []
    assert lowers_to_one_kernel(traced)


def test_what_is_left_has_room_for_the_next_layers_attention(whole_hopper):
    """A first layer, whose sum has none: attention before the kernel, which leaves room."""
    x, kernels = jax.eval_shape(functools.partial(given, LITE, left_rows=4))
    rows = jax.eval_shape(functools.partial(unattended, LITE, 4096, compressed=512))
    run = functools.partial(attended_mixture, routing=LITE.routing())
    traced = str(jax.make_jaxpr(run)(with_attention(x, rows), kernels))
    assert "paged_decode" in traced
    assert "one_token_experts" in traced
    left, *_ = jax.eval_shape(run, with_attention(x, rows), kernels)
    assert left.parts.shape[1] == LEFT_ROWS[LITE]


@pytest.mark.parametrize(
    "change",
    [
        {"window_left": 100},
        slow({"logits_soft_cap": 30.0}),
        slow({"batch_invariant": True}),
        slow({"page_layout": "HND"}),
    ],
)
def test_attention_that_does_not_fit_the_kernel_is_computed_before_it(whole_hopper, change):
    x, kernels = jax.eval_shape(functools.partial(operands, LITE))
    rows = jax.eval_shape(lambda: unattended(LITE, 1024, compressed=512, **change))
    run = functools.partial(attended_mixture, routing=LITE.routing())
    traced = str(jax.make_jaxpr(run)(with_attention(x, rows), kernels))
    assert "paged_decode" in traced
    assert "one_token_experts" in traced
    assert jax.eval_shape(run, with_attention(x, rows), kernels)[0].parts.shape[1] == 13


def test_projections_of_other_heads_are_refused(whole_hopper):
    x, kernels = jax.eval_shape(functools.partial(operands, LITE))
    rows = jax.eval_shape(functools.partial(unattended, LITE, 1024, compressed=512))
    rows = dataclasses.replace(rows, v_up=jax.ShapeDtypeStruct((3, 8, 256, 512), "bfloat16"))
    with pytest.raises(
        ValueError, match=r"`v_up` must have a projection \[values, 512\] for each layer and each of 16"
    ):
        jax.eval_shape(functools.partial(attended_mixture, routing=LITE.routing()), with_attention(x, rows), kernels)


def test_a_product_of_latent_attention_that_is_not_computed_is_refused():
    x, _ = jax.eval_shape(functools.partial(given, FEW))
    rows = jax.eval_shape(lambda: unattended(FEW, 100))
    with pytest.raises(ValueError, match="Give `attended_latents` of it"):
        multiplied(dataclasses.replace(x.additions[-1], rows=rows))
