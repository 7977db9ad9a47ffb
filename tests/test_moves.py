"""What NumPy does in place of JAX's programs outside of `jit`: the same to the bit, told like a compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import moves
from tests.jattn.harness.compile_log import compilations

NUMBERS = np.concatenate(
    [np.random.default_rng(0).normal(size=200) * 10.0**exponent for exponent in (-9, -6, -3, 0, 3, 8, 38)]
    + [[0.0, -0.0, np.inf, -np.inf, np.nan, 448.0, 464.0, 480.0, 57344.0, 65520.0]]
).astype(np.float32)
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "uint32", "int8", "bool")
MOVES = {
    "asarray": lambda x: jnp.asarray(x),
    "broadcast": lambda x: jnp.broadcast_to(x, (2, *x.shape)),
    "concatenate": lambda x: jnp.concatenate([x, x], 1),
    "index": lambda x: x[1],
    "last": lambda x: x[-1, 2],
    "new axis": lambda x: x[:, None],
    "ones": lambda x: jnp.ones_like(x),
    "range": lambda x: x[0] + jnp.arange(2, 6).astype(x.dtype),
    "reshape": lambda x: x.reshape(2, -1),
    "slice": lambda x: x[1:, ::2],
    "stack": lambda x: jnp.stack([x, x], 2),
    "transpose": lambda x: x.T,
    "weak": lambda x: jnp.full(x.shape, 2.5),
}


@pytest.fixture(autouse=True)
def moved():
    """So too where the tests compile as users do, on a GPU."""
    before = {primitive: primitive.impl for primitive in moves.MOVES}
    moves.move_by_numpy()
    yield
    for primitive, impl in before.items():
        primitive.def_impl(impl)


def same(found, expected):
    assert (found.aval, found.sharding, found.committed) == (expected.aval, expected.sharding, expected.committed)
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("of", DTYPES)
def test_conversions_are_jaxs(of):
    numbers = jax.jit(lambda x: x.astype(of))(NUMBERS)
    expected = jax.jit(lambda x: [x.astype(into) for into in DTYPES])(numbers)
    for into, result in zip(DTYPES, expected, strict=True):
        same(numbers.astype(into), result)


def test_moves_are_jaxs():
    x = jnp.asarray(np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::-1])
    expected = jax.jit(lambda x: {name: move(x) for name, move in MOVES.items()})(x)
    for name, move in MOVES.items():
        same(move(x), expected[name])


def test_array_stays_on_the_device_that_was_chosen_for_it():
    there = jax.devices()[-1]
    assert jax.device_put(np.zeros((3, 4), np.float32), there)[1].devices() == {there}


def test_program_that_jax_would_compile_is_heard_of_once():
    x, y = jnp.zeros((7, 5)), jnp.zeros((7, 6))
    x[1]
    with compilations() as again:
        x[2]
    with compilations() as new:
        y[1]
    assert not again
    assert new
