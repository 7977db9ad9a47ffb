"""A dataclass that is a pytree: its arrays are leaves, what is static tells trees apart, and any leaf may stand in."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.pytree import pytree, static


@pytree(kw_only=True)
class Rows:
    values: Any
    size: int = static(default=2)
    name: str = static()


ROWS = Rows(values=jnp.arange(2), name="a")


def test_static_fields_are_of_the_tree_and_others_are_leaves():
    leaves, tree = jax.tree.flatten(ROWS)
    np.testing.assert_array_equal(leaves, [[0, 1]])
    assert tree == jax.tree.structure(Rows(values=jnp.ones(3), name="a"))
    assert tree != jax.tree.structure(Rows(values=jnp.ones(3), name="b"))
    assert jax.tree.map(lambda _: None, ROWS, is_leaf=lambda x: isinstance(x, jax.Array)).values is None


def test_step_is_compiled_anew_for_another_static_value_alone():
    step = jax.jit(lambda rows: rows.values * rows.size)
    assert step(ROWS).tolist() == [0, 2]
    assert step(dataclasses.replace(ROWS, values=jnp.array([3, 4]))).tolist() == [6, 8]
    assert step._cache_size() == 1
    assert step(dataclasses.replace(ROWS, size=5)).tolist() == [0, 5]
    assert step._cache_size() == 2


def test_it_is_frozen_and_made_by_name():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROWS.size = 3  # pyright: ignore
    with pytest.raises(TypeError):
        Rows(jnp.arange(2), 2, "a")  # pyright: ignore
