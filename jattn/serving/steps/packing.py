"""What the host sends with a launch as one array: a transfer takes some microseconds, however small it is."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Packing:
    """How arrays lie in one of 32-bit words, each behind the other; static and hashable.

    Attributes:
        tree: What they make up.
        leaves: Shape and dtype of each: 32 bits wide, or bool.
    """

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], str], ...]

    @classmethod
    def of(cls, arrays: Any) -> "Packing":
        """The packing of these arrays and of all of their shapes."""
        leaves, tree = jax.tree.flatten(arrays)
        return cls(tree, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves))

    def unpacked(self, words: Int[Array, " words"]) -> Any:
        """The arrays, on the device."""
        arrays, end = [], 0
        for shape, dtype in self.leaves:
            begin, end = end, end + math.prod(shape)
            leaf = words[begin:end].reshape(shape)
            arrays.append(leaf != 0 if dtype == "bool" else lax.bitcast_convert_type(leaf, jnp.dtype(dtype)))
        return jax.tree.unflatten(self.tree, arrays)


def packed(arrays: Any) -> np.ndarray:
    """The words of arrays of the host."""
    return np.concatenate([_words(leaf) for leaf in jax.tree.leaves(arrays)])


def _words(leaf: np.ndarray) -> np.ndarray:
    leaf = leaf.reshape(-1)
    return leaf.astype(np.int32) if leaf.dtype == np.bool_ else leaf.view(np.int32)


def on_packed(step: Callable[..., Any], packing: Packing, *arguments: Any) -> Any:
    """A step whose last arguments come as one, packed."""
    *held, words = arguments
    return step(*held, *packing.unpacked(words))
