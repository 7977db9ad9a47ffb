"""The Triton kernel of the rotary embedding with the page write, by its interpreter."""

# isort: off
from tests.kernels.harness.triton_interpreter import interpreted
# isort: on

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from jattn_kernels import rotate_and_write
from jattn_kernels.triton import rotate_and_write as kernel
from jattn_kernels.triton.fp8 import to_fp8
from jattn_kernels.triton.launch import launch
from tests.kernels.harness.rotary_cases import (
    NORM_KINDS,
    SHAPES,
    arguments,
    assert_agrees,
    expected,
    head_norms,
    normed,
)
from tests.often import often_together, slow


def run(given, num_kv_heads, layout="NHD", **facts):
    with interpreted():
        results = rotate_and_write(*given, num_kv_heads=num_kv_heads, layout=layout, implementation="triton", **facts)
        return jax.block_until_ready(results)


def of_nobody(qkv, cos, sin, k_pages, v_pages, slots):
    """The call with NaN in all pages, and in the rows of tokens that are written nowhere."""
    k_pages, v_pages = (jnp.full_like(pages, jnp.nan) for pages in (k_pages, v_pages))
    return qkv.at[2:4].set(jnp.nan), cos, sin, k_pages, v_pages, slots


@pytest.mark.parametrize(
    ("half", "num_q_heads", "num_kv_heads", "head_dim", "layout"), [(None, *SHAPES[0]), (16, *SHAPES[1])]
)
def test_triton_rotate_and_write_turns_pairs_and_writes_slots(half, num_q_heads, num_kv_heads, head_dim, layout):
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout, half=half)
    results = jax.jit(lambda layer: run(given, num_kv_heads, layout, layer_index=layer))(jnp.int32(1))
    assert_agrees(results, expected(num_kv_heads, layout, 1, *given))


OFTEN = [
    (5, 1, 80, None, 1, "NHD"),
    (12, 3, 72, 9, 3, "HND"),
    (1, 1, 8, None, 5, "NHD"),
    (7, 7, 96, 0, 16, "NHD"),
    (16, 2, 512, None, 32, "HND"),
]


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "half", "page_size", "layout"),
    often_together([(*case[:-1], layout) for case in OFTEN for layout in ("NHD", "HND")], OFTEN),
)
def test_triton_rotate_and_write_of_any_heads_and_pages(num_q_heads, num_kv_heads, head_dim, half, page_size, layout):
    given = arguments(num_q_heads, num_kv_heads, head_dim, layout, dtype="float32", half=half, page_size=page_size)
    given = of_nobody(*given)
    assert_agrees(run(given, num_kv_heads, layout, layer_index=0), expected(num_kv_heads, layout, 0, *given))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        slow("bfloat16", "float16"),
        ("float16", "bfloat16"),
        slow("float16", "float32"),
        slow("float32", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e5m2"),
        slow("float32", "float8_e4m3fn"),
    ],
)
def test_triton_rotate_and_write_rounds_to_the_dtype_of_the_pages(dtype, kv_dtype):
    given = of_nobody(*arguments(6, 2, 64, "NHD", dtype=dtype, kv_dtype=kv_dtype, half=24))
    assert_agrees(run(given, 2, layer_index=1), expected(2, "NHD", 1, *given))


NORMED = [(64, None, "bfloat16"), (72, 9, "float32"), (96, 0, "float16")]


@pytest.mark.parametrize(
    ("head_dim", "half", "dtype", "kind"),
    often_together(
        [(*case, kind) for case in NORMED for kind in NORM_KINDS],
        [(*case, kind) for case, kind in zip(NORMED, NORM_KINDS, strict=True)],
    ),
)
def test_triton_rotate_and_write_norms_heads_before_they_turn(head_dim, half, dtype, kind):
    given = arguments(6, 2, head_dim, "NHD", dtype=dtype, half=half)
    norms = head_norms(head_dim, dtype=dtype, kind=kind)
    results = run(given, 2, layer_index=1, norms=norms)
    wanted = expected(2, "NHD", 1, normed(given[0], norms, 2), *given[1:])
    assert_agrees(results, wanted, normed_as=dtype)


def test_triton_rotate_and_write_is_the_same_with_more_heads_a_program(monkeypatch):
    given = arguments(42, 6, 80, "HND", half=20)
    few = run(given, 6, "HND", layer_index=1)
    monkeypatch.setattr(kernel, "_PROGRAMS_PER_SM", 0)
    for one, other in zip(few, run(given, 6, "HND", layer_index=1), strict=True):
        np.testing.assert_array_equal(one, other)


def test_triton_rotate_and_write_into_pages_without_layers():
    qkv, cos, sin, k_pages, v_pages, slots = arguments(6, 2, 64, "NHD")
    q, k, v = run((qkv, cos, sin, k_pages[1], v_pages[1], slots), 2)
    wanted = expected(2, "NHD", 1, qkv, cos, sin, k_pages, v_pages, slots)
    assert_agrees((q, k, v), (wanted[0], wanted[1][1], wanted[2][1]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "float8_e4m3fn"}, "does not take float8_e4m3fn heads in rotate_and_write"),
        ({"head_dim": 2048}, "head_dim 1 to 1024 in rotate_and_write, not 5 of 2048"),
    ],
)
def test_triton_rotate_and_write_refuses_with_a_sentence(change, sentence):
    facts = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 64, "layout": "NHD"} | change
    with pytest.raises(NotImplementedError, match=sentence):
        run(arguments(**facts), 1, layer_index=0)


@triton.jit
def to_bytes(x_ptr, out_ptr, C: tl.constexpr):
    at = tl.program_id(0) * 8192 + tl.arange(0, 8192)
    tl.store(out_ptr + at, to_fp8(tl.load(x_ptr + at), C))


@pytest.mark.parametrize(("fp8", "dtype"), [("e4m3", jnp.float8_e4m3fn), ("e5m2", jnp.float8_e5m2)])
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
def test_every_16_bit_float_becomes_the_nearest_8_bit_float(fp8, dtype, wide):
    x = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(wide))
    x[np.isnan(x)] = np.nan  # NumPy warns of the others
    with interpreted():
        (stored,) = launch(
            to_bytes, jnp.asarray(x), config=fp8, grid=8, out_type=[jax.ShapeDtypeStruct(x.shape, jnp.uint8)]
        )
    limit = float(jnp.finfo(dtype).max)
    wanted = np.clip(x.astype(np.float32), -limit, limit).astype(dtype)
    is_number = ~np.isnan(x)
    stored = np.asarray(stored)
    np.testing.assert_array_equal(stored[is_number], wanted.view(np.uint8)[is_number])
    assert np.isnan(stored[~is_number].view(dtype)).all()
