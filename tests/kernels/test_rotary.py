"""Rotary embedding with the page write: against plain loops, in the Hopper kernel, and on the GPU itself."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, rotate, rotate_and_write
from jattn_kernels.call import AttentionCall, Device
from jattn_kernels.mosaic.sm90 import rotate_and_write as sm90
from jattn_kernels.mosaic.sm90.rotate_and_write import rotate_and_write as mosaic_rotate_and_write
from jattn_kernels.operands import RotaryOperands
from tests.kernels.harness.interpreter import interpreted

LAYERS, PAGES, PAGE_SIZE = 2, 4, 8
SLOTS = (3, 31, -1, 32, 9)  # the third and fourth are nowhere
SHAPES = [(8, 4, 64, "NHD"), (8, 4, 128, "HND"), (6, 2, 128, "NHD"), (4, 2, 256, "NHD")]


def arguments(num_q_heads, num_kv_heads, head_dim, layout, *, dtype="bfloat16", half=None):
    rng = np.random.default_rng(0)
    page = (PAGE_SIZE, num_kv_heads) if layout == "NHD" else (num_kv_heads, PAGE_SIZE)
    angles = rng.uniform(-4, 4, (len(SLOTS), head_dim // 2 if half is None else half))
    qkv, k_pages, v_pages = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in (
            (len(SLOTS), num_q_heads + 2 * num_kv_heads, head_dim),
            (LAYERS, PAGES, *page, head_dim),
            (LAYERS, PAGES, *page, head_dim),
        )
    )
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    return qkv, cos, sin, k_pages, v_pages, jnp.asarray(SLOTS, jnp.int32)


def as_float32(*arrays):
    return [np.asarray(a.astype(jnp.float32)) for a in arrays]


def expected(num_kv_heads, layout, layer, qkv, cos, sin, k_pages, v_pages, slots):
    """One head and one pair at a time."""
    dtype = qkv.dtype
    qkv, cos, sin, k_pages, v_pages = as_float32(qkv, cos, sin, k_pages, v_pages)
    half, num_q_heads = cos.shape[1], qkv.shape[1] - 2 * num_kv_heads
    turned = qkv.copy()
    for t, head, i in np.ndindex(qkv.shape[0], num_q_heads + num_kv_heads, half):
        a, b = qkv[t, head, i], qkv[t, head, i + half]
        turned[t, head, i] = a * cos[t, i] - b * sin[t, i]
        turned[t, head, i + half] = b * cos[t, i] + a * sin[t, i]
    turned = np.asarray(jnp.asarray(turned).astype(dtype).astype(jnp.float32))
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    for t, slot in enumerate(np.asarray(slots).tolist()):
        if 0 <= slot < PAGES * PAGE_SIZE:
            for head in range(num_kv_heads):
                page, offset = divmod(slot, PAGE_SIZE)
                place = (layer, page, offset, head) if layout == "NHD" else (layer, page, head, offset)
                k_pages[place] = turned[t, num_q_heads + head]
                v_pages[place] = turned[t, num_q_heads + num_kv_heads + head]
    return turned[:, :num_q_heads], k_pages, v_pages


def mosaic_call(arrays, layer_index, spec):
    names = ("qkv", "cos", "sin", "k_pages", "v_pages", "slots")
    operands = RotaryOperands(**dict(zip(names, arrays, strict=True)), layer_index=layer_index)
    dtypes = dict.fromkeys(("q_dtype", "kv_dtype"), operands.qkv.dtype.name)
    return AttentionCall(operation="rotate_and_write", spec=spec, page_size=None, **dtypes), operands


def assert_agrees(results, wanted, dtype):
    # A product and a sum in float32 may be one rounding or two: a unit in the last place of the result's dtype.
    for result, right in zip(as_float32(*results), wanted, strict=True):
        np.testing.assert_allclose(result, right, rtol=float(jnp.finfo(dtype).eps), atol=1e-6)


@pytest.mark.parametrize("half", [None, 16])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout"), SHAPES)
def test_rotate_and_write_turns_pairs_and_writes_slots(num_q_heads, num_kv_heads, head_dim, layout, half):
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout, half=half)
    results = jax.jit(
        lambda layer: rotate_and_write(
            *given, num_kv_heads=num_kv_heads, layout=layout, layer_index=layer, implementation="xla"
        )
    )(jnp.int32(1))
    assert_agrees(results, expected(num_kv_heads, layout, 1, *given), given[0].dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout"), SHAPES)
def test_mosaic_rotate_and_write_agrees_without_races(monkeypatch, num_q_heads, num_kv_heads, head_dim, layout, dtype):
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout, dtype=dtype)
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    with interpreted():
        results = rotate_and_write(
            *given, num_kv_heads=num_kv_heads, layout=layout, layer_index=1, implementation="mosaic"
        )
        assert_agrees(results, expected(num_kv_heads, layout, 1, *given), dtype)


@pytest.mark.parametrize("blocks", [1, 12])
def test_mosaic_rotate_and_write_of_many_tokens_takes_more_heads_a_block(monkeypatch, blocks):
    given = arguments(6, 2, 128, "NHD")
    monkeypatch.setattr(sm90, "_BLOCKS_PER_SM", 1)
    monkeypatch.setattr(sm90.tiles, "num_sms", lambda: blocks)
    spec = AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=128)
    with interpreted():
        results = mosaic_rotate_and_write(*mosaic_call(given, 1, spec))
        assert_agrees(results, expected(2, "NHD", 1, *given), "bfloat16")


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout"), SHAPES)
def test_mosaic_rotate_and_write_lowers_for_cuda_in_place(num_q_heads, num_kv_heads, head_dim, layout):
    spec = AttentionSpec(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_layout=layout)
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout)
    in_place = jax.jit(lambda layer, *given: mosaic_rotate_and_write(*mosaic_call(given, layer, spec)))
    traced = in_place.trace(jnp.int32(1), *given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("#stablehlo.output_operand_alias<") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "layout"), SHAPES)
def test_gpu_rotate_and_write_agrees(num_q_heads, num_kv_heads, head_dim, layout, dtype):
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout, dtype=dtype)
    results = rotate_and_write(*given, num_kv_heads=num_kv_heads, layout=layout, layer_index=1, implementation="mosaic")
    assert_agrees(results, expected(num_kv_heads, layout, 1, *given), dtype)


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
