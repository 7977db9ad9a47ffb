"""What is lowered is hashed without names, places and the order of independent work, but with all arithmetic."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax import lax

from bench.lowered import lowered_hash

X = jax.ShapeDtypeStruct((128,), jnp.float32)


def kernel_of(*, name="double", factor=2.0):
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * factor

    def renamed(source, target):
        # With a comment.
        values = source[...]
        target[...] = values * factor

    body = double if name == "double" else renamed
    return plgpu.kernel(body, out_type=X, kernel_name=name)


def test_kernel_keeps_its_hash_under_other_names_and_in_other_places():
    assert lowered_hash(kernel_of(), X) == lowered_hash(kernel_of(name="twice"), X)


def test_kernel_of_another_constant_has_another_hash():
    assert lowered_hash(kernel_of(), X) != lowered_hash(kernel_of(factor=3.0), X)


def plain(x, y):
    return jnp.cos(x) + lax.fori_loop(0, 3, lambda _, z: z * 2.0, y)


def renamed(first, second):
    @jax.jit
    def helper(value):
        return lax.fori_loop(0, 3, lambda _, part: part * 2.0, value)

    doubled = helper(second)
    jnp.sin(doubled)  # nobody needs it
    return jnp.cos(first) + doubled


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (renamed, True),
        (lambda x, y: jnp.cos(y) + lax.fori_loop(0, 3, lambda _, z: z * 2.0, x), False),
        (lambda x, y: jnp.cos(x) + lax.fori_loop(0, 4, lambda _, z: z * 2.0, y), False),
        (lambda x, y: jnp.cos(x) + lax.fori_loop(0, 3, lambda _, z: z * 2.5, y), False),
        (lambda x, y: jnp.sin(x) + lax.fori_loop(0, 3, lambda _, z: z * 2.0, y), False),
    ],
)
def test_operations_of_xla_count_by_what_they_compute(other, is_same):
    assert (lowered_hash(plain, X, X) == lowered_hash(other, X, X)) == is_same
