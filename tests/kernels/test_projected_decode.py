"""Decode of what a projection has left, its heads turned and its keys written by the kernel that attends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, HeadNorms, Splits, Unattended, make_schedule
from jattn_kernels.call import Device
from jattn_kernels.dispatch import serves
from jattn_kernels.unattended import attended, unattended_call
from tests.kernels.harness.interpreter import interpreted
from tests.often import slow

LAYERS, WIDTH = 2, 128


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU of few SMs, so that workers have several sequences and split some."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 6))


def unattended(
    seq_lens,
    dtype="bfloat16",
    *,
    kv_dtype=None,
    group=4,
    kv_heads=2,
    page_size=16,
    normed=False,
    rounded=False,
    **facts,
):
    """Tokens at the ends of their sequences; NaN wherever there is no key, in the other layer too, and for their own.

    A sequence of no keys has no place for its token; nor has the last one of more than one, whose key is there already.
    """
    batch, heads = len(seq_lens), group * kv_heads
    spec = AttentionSpec(num_q_heads=heads, num_kv_heads=kv_heads, head_dim=WIDTH, sm_scale=0.1, **facts)
    width = -(-max(seq_lens) // page_size) + 1
    shape = (LAYERS, batch * width + 1, page_size, kv_heads, WIDTH)
    table = 1 + jax.random.permutation(jax.random.key(20), batch * width).reshape(batch, width).astype(jnp.int32)
    has_place = [int(length > 0 and (batch == 1 or number < batch - 1)) for number, length in enumerate(seq_lens)]
    last = jnp.maximum(jnp.array(seq_lens) - 1, 0)
    slots = jnp.take_along_axis(table, last[:, None] // page_size, axis=1)[:, 0] * page_size + last % page_size
    there = jnp.arange(width * page_size)[None] < (jnp.array(seq_lens) - jnp.array(has_place))[:, None]
    is_owned = jnp.zeros(shape[1:3], bool).at[table].set(there.reshape(batch, width, page_size))

    def filled(key):
        numbers = jnp.where(is_owned[:, :, None, None], jax.random.normal(jax.random.key(key), shape), jnp.nan)
        numbers = numbers.at[:-1].set(jnp.nan).astype(kv_dtype or dtype)
        return numbers if spec.page_layout == "NHD" else numbers.swapaxes(2, 3)

    rows = -(-batch // 4) * 4
    parts = jax.random.normal(jax.random.key(21), (3, rows, heads + 2 * kv_heads, WIDTH))
    angles = jnp.linspace(0, 3, WIDTH // 2)[None] * jnp.arange(1.0, batch + 1)[:, None]
    scales = [jax.random.normal(jax.random.key(key), (3, WIDTH)).astype(dtype) for key in (24, 25)]
    return Unattended(
        qkv=Splits(parts=parts.astype(dtype) if rounded else parts, num_rows=batch, dtype=jnp.dtype(dtype)),
        cos=jnp.cos(angles),
        sin=jnp.sin(angles),
        slots=jnp.where(jnp.array(has_place) > 0, slots, -1),
        norms=HeadNorms(q_scale=scales[0], k_scale=scales[1], layer_index=1, eps=1e-6) if normed else None,
        k_pages=filled(22),
        v_pages=filled(23),
        page_table=table,
        seq_lens=jnp.array(seq_lens, jnp.int32),
        layer_index=LAYERS - 1,
        spec=spec,
        implementation="mosaic",
    )


def assert_as_in_turn(rows):
    """The result and the pages are those of a kernel for each; nothing else in the pages has changed."""
    out, pages = jax.jit(attended)(rows)
    expected, expected_pages = attended(dataclasses.replace(rows, schedule=None, implementation="xla"))
    eps = float(jnp.finfo(out.dtype).eps)
    np.testing.assert_allclose(out.astype("float32"), expected.astype("float32"), rtol=4 * eps, atol=4 * eps)
    for own, other in zip(pages, expected_pages, strict=True):
        np.testing.assert_allclose(own.astype("float32"), other.astype("float32"), rtol=2 * eps, atol=eps)
        assert np.mean(np.asarray(own != other) & ~np.isnan(own.astype("float32"))) < 0.001


@pytest.mark.parametrize(
    ("seq_lens", "options"),
    [
        slow((100,), {}),
        ((64, 0, 65, 200, 3), {"rounded": True}),  # a worker has several, of which some are split
        slow((70, 129), {"group": 8, "kv_heads": 1, "page_size": 64, "page_layout": "HND"}),
        slow((33, 20), {"group": 1, "kv_heads": 8, "dtype": "float16"}),
        slow((300, 90), {"page_size": 128, "window_left": 70}),
        ((130, 1, 77), {"kv_dtype": "float8_e4m3fn", "rounded": True}),
        slow((65,), {"kv_dtype": "float8_e5m2", "group": 8, "dtype": "float16"}),
    ],
)
def test_decode_of_a_projection_without_races(hopper, seq_lens, options):
    rows = unattended(seq_lens, **options)
    assert serves(dataclasses.replace(unattended_call(rows)[0], operation="projected_decode"), "mosaic")
    with interpreted():
        assert_as_in_turn(rows)


def test_it_takes_a_schedule(hopper):
    rows = unattended((100, 30))
    facts = {"spec": rows.spec, "dtype": "bfloat16", "page_size": 16, "features": ("layer_index",)}
    with interpreted():
        schedule = make_schedule(rows.seq_lens, num_tokens=1, operation="paged_decode", max_seq_len=112, **facts)
        assert_as_in_turn(dataclasses.replace(rows, schedule=schedule))


@pytest.mark.parametrize(
    "change",
    [
        {"group": 3, "kv_heads": 8},
        {"page_size": 256},
        {"rope_theta": 1e4},
        {"normed": True},
    ],
)
def test_other_rows_are_turned_by_a_kernel_of_their_own(hopper, change):
    rows = unattended((50, 60), **change)
    assert not serves(dataclasses.replace(unattended_call(rows)[0], operation="projected_decode"))


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (1, {}),
        slow(64, {}),
        slow(1, {"group": 8, "kv_heads": 4, "page_layout": "HND"}),
        slow(64, {"group": 8, "kv_heads": 4, "page_layout": "HND"}),
        slow(1, {"kv_dtype": "float8_e4m3fn"}),
        slow(64, {"kv_dtype": "float8_e4m3fn"}),
        slow(1, {"kv_dtype": "float8_e5m2", "group": 1, "dtype": "float16"}),
        (64, {"kv_dtype": "float8_e5m2", "group": 1, "dtype": "float16"}),
    ],
)
def test_it_is_two_kernels_for_cuda(monkeypatch, batch, options):
    """That, and the merge of splits."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    rows = jax.eval_shape(functools.partial(unattended, (1024,) * batch, **{"kv_heads": 8, **options}))
    text = jax.jit(attended).trace(rows).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group": 8, "kv_heads": 4, "page_layout": "HND"},
        {"kv_dtype": "float8_e4m3fn", "rounded": True},
    ],
)
@pytest.mark.parametrize("page_size", [8, 16, 64, 128])
@pytest.mark.parametrize("seq_lens", [(1,), (1024,), (5000,), tuple(range(0, 4096, 67))])
def test_decode_of_a_projection_on_a_gpu(options, page_size, seq_lens):
    for dtype in ("bfloat16", "float16"):
        assert_as_in_turn(unattended(seq_lens, dtype, page_size=page_size, **{"kv_heads": 8, **options}))
