"""The norm's Triton kernel, by its interpreter."""

# isort: off
from tests.kernels.harness.triton_interpreter import interpreted
# isort: on

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import rms_norm
from jattn_kernels.triton import rms_norm as kernel
from jattn_kernels.triton.launch import launch
from tests.kernels.harness.norm_rows import EPS, assert_norm, rows


def norm(x, scale, **facts):
    with interpreted():
        return jax.block_until_ready(rms_norm(x, scale, eps=EPS, implementation="triton", **facts))


@pytest.mark.parametrize(
    ("shape", "dtype", "scale_dtype", "offset"),
    [
        ((2, 3, 40), "float32", "float32", 1.0),
        ((37, 1), "float16", "float32", 0.0),
        ((9, 5, 128), "bfloat16", "bfloat16", 0.0),  # the last program has rows that there are not
        ((16, 64), "float16", "float16", 1.0),
        ((2, 1000), "float32", "bfloat16", 0.0),
        ((3, 5120), "bfloat16", "float32", 1.0),
        ((1, 32768), "bfloat16", "bfloat16", 0.0),
    ],
)
def test_triton_norm_of_a_layer_of_the_stack(shape, dtype, scale_dtype, offset):
    x, scale = rows(*shape, dtype=dtype), rows(3, shape[-1], dtype=scale_dtype, key=1)
    scale = scale.at[np.array([0, 2])].set(jnp.nan)  # layers that nobody asks for
    out = jax.jit(lambda layer: norm(x, scale, offset=offset, layer_index=layer))(jnp.int32(1))
    assert_norm(out, x, scale[1], offset)


def test_triton_norm_by_a_scale_of_its_own():
    x, scale = rows(3, 96), rows(96, key=1)
    assert_norm(norm(x, scale), x, scale)


@pytest.mark.parametrize("columns", [64, 3072])
def test_triton_norm_of_a_row_is_the_same_in_any_batch(monkeypatch, columns):
    """On a GPU its sum's order is that of the program's rows, columns and warps."""
    launches = []

    def watched(*args, config, warps, **facts):
        launches.append((config.rows, config.block, warps))
        return launch(*args, config=config, warps=warps, **facts)

    monkeypatch.setattr(kernel, "launch", watched)
    x, scale = rows(33, columns), rows(columns, key=1)
    together = norm(x, scale)
    for row in (7, 32):
        np.testing.assert_array_equal(together[row], norm(x[row], scale))
    assert len(launches) == 3
    assert len(set(launches)) == 1


@pytest.mark.parametrize(
    ("x", "scale", "sentence"),
    [
        (jnp.ones((2, 40000)), jnp.ones(40000), "some rows of 1 to 32,768 numbers, not 2 of 40000"),
        (jnp.ones((0, 40)), jnp.ones(40), "not 0 of 40"),
        (jnp.ones((2, 40), "float8_e5m2"), jnp.ones(40), "rows of float8_e5m2 with a scale in float32"),
        (jnp.ones((2, 40)), jnp.ones(40, "float8_e5m2"), "rows of float32 with a scale in float8_e5m2"),
    ],
)
def test_triton_norm_refuses_with_a_sentence(x, scale, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        norm(x, scale)
