"""Queries absorbed beside the write of latent rows: against the parts by themselves, in the kernel, and on the GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import RawLatents, RawQueries, absorb_and_write, mla_write
from jattn_kernels.call import Device, default_device
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.splits import splits_of
from tests.often import slow

HEADS, NOPE, LAYERS, LAYER = 3, 128, 2, 1


def given(tokens=5, compressed=128, dtype="bfloat16", *, splits=None):
    """Queries before latents in one product's rows, pages of two layers, and slots, two of them out of range."""
    rng = np.random.default_rng(0)
    begin, width = HEADS * (NOPE + 64), compressed + 64
    angles = rng.uniform(0, 6, (tokens, 32)).astype(np.float32)
    rows = jnp.asarray(rng.standard_normal((tokens, begin + width)), dtype)
    rows = rows if splits is None else splits_of(rows, splits)
    k_up = np.full((LAYERS, HEADS, NOPE, compressed), np.nan)
    k_up[LAYER] = rng.standard_normal(k_up.shape[1:]) / np.sqrt(NOPE)
    latents = RawLatents(
        rows=rows,
        scale=jnp.asarray(rng.uniform(0.5, 1.5, (LAYERS, compressed)), dtype),
        layer_index=LAYER,
        cos=jnp.asarray(np.cos(angles)),
        sin=jnp.asarray(np.sin(angles)),
        eps=1e-6,
        begin=begin,
    )
    queries = RawQueries(rows=rows, k_up=jnp.asarray(k_up, dtype), layer_index=LAYER, rope_dim=64)
    pages = jnp.asarray(rng.standard_normal((LAYERS, 4 + tokens // 16, 16, width)), dtype)
    slots = jnp.asarray([17, -1, 3, pages.shape[1] * 16, *range(30, 26 + tokens)], jnp.int32)[:tokens]
    return queries, latents, pages, slots


def assert_absorbs(queries, latents, pages, slots):
    """By the kernel as by XLA in parts; each is rounded once, of sums in another order."""
    run = jax.jit(lambda *args: absorb_and_write(*args, layer_index=LAYER, implementation="mosaic"))
    q_nope, q_pe, rows, written = run(queries, latents, pages, slots)
    expected_rows, expected_pages = jax.jit(lambda *args: mla_write(*args, layer_index=LAYER, implementation="xla"))(
        latents, pages, slots
    )
    nope, turned = queries.heads(latents.cos, latents.sin)
    k_up = np.asarray(queries.k_up[LAYER], np.float64)
    absorbed = np.einsum("tnd,ndc->tnc", np.asarray(nope, np.float64), k_up)
    bit = float(jnp.finfo(q_nope.dtype).eps)
    assert {array.dtype for array in (q_nope, q_pe, rows, written)} == {pages.dtype}
    for found, wanted, atol in (
        (q_nope, absorbed, np.abs(absorbed).max() * 2**-20),
        (q_pe, turned, 1e-5),
        (rows, expected_rows, 1e-6),
        (written, expected_pages, 1e-6),
    ):
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (found, wanted)), rtol=bit, atol=atol)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    with interpreted():
        yield


@pytest.mark.parametrize(
    ("tokens", "splits", "dtype"),
    [
        (1, 3, "bfloat16"),
        slow(5, 2, "float16"),
        slow(8, 2, "bfloat16"),
        slow(13, None, "bfloat16"),
        (13, 2, "float16"),
    ],
)
def test_mosaic_absorbs_and_writes_without_races(hopper, tokens, splits, dtype):
    assert_absorbs(*given(tokens, dtype=dtype, splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize("compressed", [512, 128])
@pytest.mark.parametrize(("tokens", "splits"), [(1, 2), (5, 3), (8, 2), (13, None), (40, None), (64, None)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpu_absorbs_and_writes(tokens, splits, dtype, compressed):
    if default_device().compute_capability != (9, 0):
        pytest.skip("only Hopper has this kernel")
    assert_absorbs(*given(tokens, compressed, dtype, splits=splits))


def test_queries_without_layers_are_those_of_the_layer(hopper):
    queries, latents, pages, slots = given(2)
    run = jax.jit(lambda *args: absorb_and_write(*args, layer_index=LAYER)[0])
    alone = dataclasses.replace(queries, k_up=queries.k_up[LAYER], layer_index=None)
    np.testing.assert_array_equal(run(alone, latents, pages, slots), run(queries, latents, pages, slots))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k_up": jnp.zeros((2, 5, NOPE, 128), "bfloat16")}, "Queries must have 5 rows of at least 960 numbers"),
        ({"k_up": jnp.zeros((2, 3, NOPE, 64), "bfloat16")}, "and `k_up` 128 numbers for each of a head's"),
        ({"k_up": jnp.zeros((2, 3, NOPE, 128), "float16")}, "`k_up`"),
        ({"layer_index": 2}, "`layer_index` must"),
        ({"rope_dim": 32}, "`queries` must turn in 64 numbers, as `latents` do, .* Got rope_dim=32"),
        ({"rows": jnp.zeros((4, 960), "bfloat16")}, "Queries must have 5 rows"),
    ],
)
def test_what_are_no_queries_of_the_rows_is_refused(change, sentence):
    queries, *rest = given()
    with pytest.raises(ValueError, match=sentence):
        absorb_and_write(dataclasses.replace(queries, **change), *rest, layer_index=LAYER)


def test_what_no_kernel_absorbs_is_refused(hopper):
    queries, latents, pages, slots = given()
    narrow = dataclasses.replace(queries, k_up=queries.k_up[..., :64, :])
    sentence = "`mosaic` absorbs queries of 1 to 64 tokens in mla_write, 128 numbers of a head, not of "
    with pytest.raises(NotImplementedError, match=f"{sentence}65, 128 of a head"):
        absorb_and_write(*given(65), layer_index=LAYER)
    with pytest.raises(NotImplementedError, match=f"{sentence}5, 64 of a head"):
        absorb_and_write(narrow, latents, pages, slots, layer_index=LAYER)
