"""Rotary embedding with the page write: against plain loops, in the Hopper kernel, and on the GPU itself."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, HeadNorms, added, rotate, rotate_and_write
from jattn_kernels.call import AttentionCall, Device
from jattn_kernels.mosaic.sm90 import rotate_and_write as sm90
from jattn_kernels.mosaic.sm90.rotate_and_write import rotate_and_write as mosaic_rotate_and_write
from jattn_kernels.operands import RotaryOperands
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.rotary_cases import (
    NORM_KINDS,
    SHAPES,
    arguments,
    as_float32,
    assert_agrees,
    expected,
    head_norms,
    normed,
)
from tests.kernels.harness.splits import splits_of
from tests.often import often_together

ONES = {"q_scale": jnp.ones(64), "k_scale": jnp.ones(64)}


def mosaic_call(arrays, layer_index, spec, norms=None):
    names = ("qkv", "cos", "sin", "k_pages", "v_pages", "slots")
    operands = RotaryOperands(**dict(zip(names, arrays, strict=True)), layer_index=layer_index, norms=norms)
    dtypes = dict.fromkeys(("q_dtype", "kv_dtype"), operands.qkv.dtype.name)
    return AttentionCall(operation="rotate_and_write", spec=spec, page_size=None, **dtypes), operands


@pytest.mark.parametrize("half", [None, 16])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout"), SHAPES)
def test_rotate_and_write_turns_pairs_and_writes_slots(num_q_heads, num_kv_heads, head_dim, layout, half):
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout, half=half)
    results = jax.jit(
        lambda layer: rotate_and_write(
            *given, num_kv_heads=num_kv_heads, layout=layout, layer_index=layer, implementation="xla"
        )
    )(jnp.int32(1))
    assert_agrees(results, expected(num_kv_heads, layout, 1, *given))


def with_each(*values):
    """Shapes with each of the values; in the default tests each shape has one, in turn."""
    chosen = [(*shape, values[number % len(values)]) for number, shape in enumerate(SHAPES)]
    return often_together([(*shape, value) for shape in SHAPES for value in values], chosen)


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "layout", "dtype"), with_each("bfloat16", "float16")
)
def test_mosaic_rotate_and_write_agrees_without_races(monkeypatch, num_q_heads, num_kv_heads, head_dim, layout, dtype):
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout, dtype=dtype)
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    with interpreted():
        results = rotate_and_write(
            *given, num_kv_heads=num_kv_heads, layout=layout, layer_index=1, implementation="mosaic"
        )
        assert_agrees(results, expected(num_kv_heads, layout, 1, *given))


def assert_writes_fp8(num_q_heads, num_kv_heads, head_dim, layout, *, kv_dtype):
    """Turned keys and values in fp8, of which one is larger than it holds."""
    qkv, *rest = arguments(num_q_heads, num_kv_heads, head_dim, layout, kv_dtype=kv_dtype)
    qkv = qkv.at[0, -1, 5].set(-1e6)
    options = {"num_kv_heads": num_kv_heads, "layout": layout, "layer_index": 1}
    results = rotate_and_write(qkv, *rest, **options, implementation="mosaic")
    q, k_pages, v_pages = rotate_and_write(qkv, *rest, **options, implementation="xla")
    assert results[1].dtype == results[2].dtype == kv_dtype
    assert_agrees(results, as_float32(q, k_pages, v_pages))
    assert float(jnp.min(results[2].astype(jnp.float32))) == -float(jnp.finfo(kv_dtype).max)


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "layout", "kv_dtype"), with_each("float8_e5m2", "float8_e4m3fn")
)
def test_mosaic_rotate_and_write_into_fp8_without_races(
    monkeypatch, num_q_heads, num_kv_heads, head_dim, layout, kv_dtype
):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    with interpreted():
        assert_writes_fp8(num_q_heads, num_kv_heads, head_dim, layout, kv_dtype=kv_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout"), SHAPES)
def test_gpu_rotate_and_write_into_fp8(num_q_heads, num_kv_heads, head_dim, layout, kv_dtype):
    assert_writes_fp8(num_q_heads, num_kv_heads, head_dim, layout, kv_dtype=kv_dtype)


def assert_adds_then_turns(num_q_heads, num_kv_heads, head_dim, layout, *, norms=None, **options):
    """Splits of heads make what their sum makes."""
    qkv, *rest = arguments(num_q_heads, num_kv_heads, head_dim, layout)
    splits = splits_of(qkv, 4)
    options |= {"num_kv_heads": num_kv_heads, "layout": layout, "layer_index": 1, "norms": norms}
    results, whole = (rotate_and_write(heads, *rest, **options) for heads in (splits, added(splits)))
    for part, expected_part in zip(results, whole, strict=True):
        np.testing.assert_array_equal(part, expected_part)


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_rotate_and_write_adds_splits(monkeypatch, implementation):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    with interpreted():
        assert_adds_then_turns(8, 4, 128, "NHD", implementation=implementation)
        assert_adds_then_turns(6, 2, 128, "HND", norms=head_norms(128), implementation=implementation)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout"), SHAPES)
def test_gpu_rotate_and_write_adds_splits(num_q_heads, num_kv_heads, head_dim, layout):
    norms = head_norms(head_dim)
    assert_adds_then_turns(num_q_heads, num_kv_heads, head_dim, layout, norms=norms, implementation="mosaic")


def assert_norms_then_turns(given, norms, num_kv_heads, layout, **options):
    """Values go to their pages as they are, queries and keys normed."""
    results = rotate_and_write(*given, num_kv_heads=num_kv_heads, layout=layout, layer_index=1, norms=norms, **options)
    rows = normed(given[0], norms, num_kv_heads)
    assert_agrees(results, expected(num_kv_heads, layout, 1, rows, *given[1:]), normed_as=given[0].dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", NORM_KINDS)
def test_rotate_and_write_norms_heads_before_they_turn(kind, dtype):
    given = arguments(6, 2, 128, "NHD", dtype=dtype, half=48)
    assert_norms_then_turns(given, head_norms(128, dtype=dtype, kind=kind), 2, "NHD", implementation="xla")


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout", "kind"), with_each(*NORM_KINDS))
def test_mosaic_rotate_and_write_norms_heads_without_races(
    monkeypatch, num_q_heads, num_kv_heads, head_dim, layout, kind
):
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout)
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    with interpreted():
        norms = head_norms(head_dim, kind=kind)
        assert_norms_then_turns(given, norms, num_kv_heads, layout, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout"), SHAPES)
def test_gpu_rotate_and_write_norms_heads(num_q_heads, num_kv_heads, head_dim, layout, kind, dtype):
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout, dtype=dtype)
    norms = head_norms(head_dim, dtype=dtype, kind=kind)
    assert_norms_then_turns(given, norms, num_kv_heads, layout, implementation="mosaic")


@pytest.mark.parametrize("blocks", [1, 12])
def test_mosaic_rotate_and_write_of_many_tokens_takes_more_heads_a_block(monkeypatch, blocks):
    given = arguments(6, 2, 128, "NHD")
    monkeypatch.setattr(sm90, "_BLOCKS_PER_SM", 1)
    monkeypatch.setattr(sm90.tiles, "num_sms", lambda: blocks)
    spec = AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=128)
    with interpreted():
        results = mosaic_rotate_and_write(*mosaic_call(given, 1, spec))
        assert_agrees(results, expected(2, "NHD", 1, *given))


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout", "norms"), with_each("layers", None))
def test_mosaic_rotate_and_write_lowers_for_cuda_in_place(num_q_heads, num_kv_heads, head_dim, layout, norms):
    spec = AttentionSpec(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_layout=layout)
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout)
    norms = None if norms is None else head_norms(head_dim, kind=norms)
    in_place = jax.jit(lambda layer, *given: mosaic_rotate_and_write(*mosaic_call(given, layer, spec, norms)))
    traced = in_place.trace(jnp.int32(1), *given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("#stablehlo.output_operand_alias<") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout"), SHAPES)
def test_gpu_rotate_and_write_agrees(num_q_heads, num_kv_heads, head_dim, layout, dtype):
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout, dtype=dtype)
    results = rotate_and_write(*given, num_kv_heads=num_kv_heads, layout=layout, layer_index=1, implementation="mosaic")
    assert_agrees(results, expected(num_kv_heads, layout, 1, *given))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cos": jnp.zeros((5, 40))}, "at most one value a pair"),
        ({"sin": jnp.zeros((5, 16))}, "`sin` must be float32 with a row a token"),
        ({"cos": jnp.zeros((5, 32), jnp.bfloat16)}, "`cos` must be float32"),
        ({"num_kv_heads": 8}, "`qkv` must have query heads"),
        ({"num_kv_heads": 0}, "`num_kv_heads`"),
        ({"qkv": jnp.zeros((5, 64))}, r"`qkv` must be \[T, heads, H\]"),
        ({"qkv": [[1.0]]}, "`qkv`"),
        ({"cos": None}, "`cos`"),
        ({"k_pages": [1.0]}, "`k_pages`"),
        ({"slots": jnp.zeros(4, jnp.int32)}, "`slots`"),
        ({"norms": 1e-6}, "`norms` must be None or HeadNorms"),
        ({"norms": HeadNorms(q_scale=jnp.ones(64), eps=1e-6)}, "both scales or none. Got q_scale alone"),
        ({"norms": HeadNorms(q_scale=jnp.ones(64), k_scale=jnp.ones(32), eps=1e-6)}, r"`k_scale` must be \[H\]"),
        ({"norms": HeadNorms(**ONES, layer_index=0, eps=1e-6)}, r"`q_scale` must be \[L, H\]"),
        ({"implementation": "other"}, "`implementation`"),
    ],
)
def test_rotate_and_write_refuses_with_a_sentence(change, sentence):
    names = ("qkv", "cos", "sin", "k_pages", "v_pages", "slots")
    given = dict(zip(names, arguments(8, 4, 64, "NHD"), strict=True)) | {"num_kv_heads": 4, "layer_index": 0}
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(rotate_and_write)(**(given | change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": [[[1.0]]]}, "`x`"),
        ({"cos": None}, "`cos`"),
        ({"x": jnp.zeros((5, 8))}, "`x`"),
        ({"sin": jnp.zeros((5, 2))}, "`sin`"),
    ],
)
def test_rotate_refuses_with_a_sentence(change, sentence):
    given = {"x": jnp.zeros((5, 2, 8)), "cos": jnp.zeros((5, 4)), "sin": jnp.zeros((5, 4))}
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(rotate)(**(given | change))


def test_mosaic_refuses_heads_that_do_not_fill_its_threads(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    given = arguments(5, 1, 64, "NHD")
    with pytest.raises(NotImplementedError, match="not 5 and 1 of 64"):
        rotate_and_write(*given, num_kv_heads=1, layer_index=0, implementation="mosaic")
