"""Latent rows made and written in one call: against the parts by themselves, in the Hopper kernel, and on the GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import mla_write, rms_norm, rotate, write_latent_pages
from jattn_kernels.call import Device, default_device
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.latent_rows import LAYER, PACKED, arguments, assert_packs, packed_arguments
from tests.kernels.harness.splits import splits_of
from tests.often import slow


def expected(latents, pages, slots):
    """The same by a norm, a rotation and a write."""
    c_kv, k_pe = jnp.split(latents.rows, (latents.compressed,), axis=-1)
    c_kv = rms_norm(c_kv, latents.scale, eps=latents.eps, layer_index=latents.layer_index, implementation="xla")
    k_pe = rotate(k_pe[:, None], latents.cos, latents.sin)[:, 0]
    return jnp.concatenate([c_kv, k_pe], axis=-1), write_latent_pages(pages, c_kv, k_pe, slots, layer_index=LAYER)


def assert_writes(given, implementation, rows=None):
    latents, pages, slots = given
    raw = latents if rows is None else dataclasses.replace(latents, rows=rows)
    results = jax.jit(
        lambda raw, pages, layer: mla_write(raw, pages, slots, layer_index=layer, implementation=implementation)
    )(raw, pages, jnp.int32(LAYER))
    for result, wanted in zip(results, expected(latents, pages, slots), strict=True):
        assert result.dtype == wanted.dtype
        # Sums in another order round differently at times, by a bit of the result.
        bit = float(jnp.finfo(result.dtype).eps)
        np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (result, wanted)), rtol=bit, atol=1e-6)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    with interpreted():
        yield


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_normed_turned_and_written(dtype):
    assert_writes(arguments(dtype=dtype), "xla")


@pytest.mark.parametrize(("compressed", "dtype"), [(512, "bfloat16"), (384, "float16"), slow(128, "bfloat16")])
def test_mosaic_makes_and_writes_rows_without_races(hopper, compressed, dtype):
    assert_writes(arguments(compressed, dtype=dtype), "mosaic")


def test_mosaic_adds_splits(hopper):
    given = arguments()
    assert_writes(given, "mosaic", rows=splits_of(given[0].rows, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 300])
@pytest.mark.parametrize(("compressed", "dtype"), [(512, "bfloat16"), (384, "float16"), (128, "bfloat16")])
def test_gpu_makes_and_writes_rows(compressed, dtype, tokens):
    if default_device().compute_capability != (9, 0):
        pytest.skip("only Hopper has this kernel")
    given = arguments(compressed, tokens, dtype)
    assert_writes(given, "mosaic")
    assert_writes(given, "mosaic", rows=splits_of(given[0].rows, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 300])
@pytest.mark.parametrize(("compressed", "dtype"), PACKED)
def test_gpu_packs_rows(compressed, dtype, tokens):
    given = packed_arguments(compressed, tokens, dtype)
    assert_packs(given, "triton")
    assert_packs(given, "triton", rows=splits_of(given[0].rows, 4))


def test_pages_without_layers_take_a_scale_without_layers():
    latents, pages, slots = arguments()
    alone = dataclasses.replace(latents, scale=latents.scale[2], layer_index=None)
    made, written = mla_write(alone, pages[LAYER], slots)
    of_layers, pages = mla_write(latents, pages, slots, layer_index=LAYER)
    np.testing.assert_array_equal(made, of_layers)
    np.testing.assert_array_equal(written, pages[LAYER])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scale": jnp.ones(256)}, r"`scale` must be \[L, C\]"),
        ({"scale": jnp.ones((3, 200))}, "`scale` must be of the compressed part of the rows, and `cos` of all pairs"),
        ({"cos": jnp.ones((4, 32))}, "`cos` must be float32 with a row a token of `rows`"),
        ({"layer_index": 3}, "`layer_index` must"),
    ],
)
def test_what_is_no_latent_row_is_refused_in_a_sentence(change, sentence):
    latents, pages, slots = arguments()
    with pytest.raises(ValueError, match=sentence):
        mla_write(dataclasses.replace(latents, **change), pages, slots, layer_index=LAYER)


def test_pages_of_another_width_are_refused():
    latents, pages, slots = arguments()
    with pytest.raises(ValueError, match="`latent_pages` must be as wide as the rows, 320"):
        mla_write(latents, pages[..., 1:], slots, layer_index=LAYER)


@pytest.mark.parametrize(
    ("pages_dtype", "compressed", "sentence"),
    [
        ("float8_e4m3fn", 256, "does not take bfloat16 rows and float8_e4m3fn latents in mla_write"),
        ("bfloat16", 192, "takes latents of a multiple of 128 numbers up to 512, and 64 rotated ones, not 192 and 64"),
    ],
)
def test_mosaic_refuses_with_a_sentence(hopper, pages_dtype, compressed, sentence):
    latents, pages, slots = arguments(compressed)
    with pytest.raises(NotImplementedError, match=sentence):
        mla_write(latents, pages.astype(pages_dtype), slots, layer_index=LAYER, implementation="mosaic")


@pytest.mark.parametrize(("splits", "skipped"), [(None, 8), slow(None, 12), slow(3, 8), (3, 12)])
def test_mosaic_writes_rows_behind_other_numbers_alike(hopper, skipped, splits):
    """By whole vectors of a thread, or not."""
    latents, pages, slots = arguments()
    others = jnp.full((len(slots), skipped), jnp.nan, latents.dtype)
    rows = jnp.concatenate([others, latents.rows], axis=1)
    own = latents.rows
    if splits:
        rows, own = splits_of(rows, splits), splits_of(own, splits)
        own = dataclasses.replace(own, parts=rows.parts[..., skipped:])
    run = jax.jit(lambda raw: mla_write(raw, pages, slots, layer_index=LAYER, implementation="mosaic"))
    behind = dataclasses.replace(latents, rows=rows, begin=skipped)
    for found, expected in zip(run(behind), run(dataclasses.replace(latents, rows=own)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_xla_writes_rows_behind_other_numbers():
    latents, pages, slots = arguments()
    others = jnp.full((len(slots), 12), jnp.nan, latents.dtype)
    behind = dataclasses.replace(latents, rows=jnp.concatenate([others, latents.rows], axis=1), begin=12)
    made = (mla_write(raw, pages, slots, layer_index=LAYER, implementation="xla") for raw in (behind, latents))
    for found, expected in zip(*made, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("begin", [-1, 320])
def test_rows_that_begin_behind_their_last_number_are_refused(begin):
    latents, pages, slots = arguments()
    with pytest.raises(ValueError, match=f"`begin` must be a column of the rows. Got begin={begin}"):
        mla_write(dataclasses.replace(latents, begin=begin), pages, slots, layer_index=LAYER)
