"""What is lowered is hashed without names, places and the order of independent work, but with all arithmetic."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax import lax

from bench import lowered as lowered_module
from bench.lowered import lowered_hash

X = jax.ShapeDtypeStruct((128,), jnp.float32)


def kernel_of(*, name="double", factor=2.0, **params):
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * factor

    def renamed(source, target):
        # With a comment.
        values = source[...]
        target[...] = values * factor

    body = double if name == "double" else renamed
    return plgpu.kernel(body, out_type=X, kernel_name=name, compiler_params=plgpu.CompilerParams(**params))


def test_kernel_keeps_its_hash_under_other_names_and_in_other_places():
    assert lowered_hash(kernel_of(), X) == lowered_hash(kernel_of(name="twice"), X)


def test_kernel_of_another_constant_has_another_hash():
    assert lowered_hash(kernel_of(), X) != lowered_hash(kernel_of(factor=3.0), X)


def test_kernel_without_barriers_of_mosaics_own_has_another_hash():
    assert lowered_hash(kernel_of(), X) != lowered_hash(kernel_of(unsafe_no_auto_barriers=True), X)


def test_kernel_of_lanes_has_a_hash_too():
    lanes = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    hashes = {
        lowered_hash(plgpu.kernel(body, out_type=X, compiler_params=lanes), X)
        for body in (lambda x, out: out.__setitem__(..., x[...]), lambda x, out: out.__setitem__(..., x[...] * 2.0))
    }
    assert len(hashes) == 2


def test_kernels_are_lowered_whole_afterwards():
    def lowered():
        return jax.jit(kernel_of()).trace(X).lower(lowering_platforms=("cuda",)).as_text()

    with lowered_module._kernels_before_layouts():
        assert "jattn.digest" in lowered()
    assert "jattn.digest" not in lowered()


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
