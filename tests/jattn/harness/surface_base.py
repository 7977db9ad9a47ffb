"""A surface as the tests call it: it takes a batch and answers in the same form as every other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.jattn.harness.common_batches import LAYER, LAYERS, Batch, Case, padded


class Surface:
    """A surface made for a case, whose whole step is metadata, write and attention.

    The step is compiled once, for the first batch and with the pool donated: another tree or shape is an error.
    """

    def __init__(self, case: Case):
        self.case = case
        self._compiled: Any = None

    @staticmethod
    def serves(case: Case) -> bool:
        """Whether the surface has what the case asks for."""
        raise NotImplementedError

    def pool(self, k_pages: np.ndarray, v_pages: np.ndarray) -> Any:
        """The pool whose layer has these pages."""
        raise NotImplementedError

    def pages(self, pool: Any) -> tuple[Any, Any]:
        """The layer's pages."""
        raise NotImplementedError

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        """What the step takes beside the pool."""
        raise NotImplementedError

    def _step(self, pool: Any, *arguments: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def places(self, batch: Batch) -> np.ndarray:
        """Which of the step's tokens are the real ones."""
        return np.arange(len(batch.q))

    def tokens(self, batch: Batch) -> tuple[jax.Array | None, ...]:
        """Queries, keys and values of the bucket, NaN where padded; None for keys and values if none can come."""
        sizes = (batch.case.num_tokens, batch.case.num_new_keys, batch.case.num_new_keys)
        rows = zip((batch.q, batch.k, batch.v), sizes, strict=True)
        return tuple(jnp.asarray(padded(x, size)) if size else None for x, size in rows)

    def run(self, batch: Batch, pool: Any = None) -> tuple[np.ndarray, Any]:
        """What the step says of the bucket's tokens, and its pool.

        Args:
            pool: Donated; None is one that has the batch's keys.
        """
        if pool is None:
            pool = self.pool(*map(batch.pages, batch.before()))
        arguments = self.arguments(batch)
        if self._compiled is None:
            self._compiled = self._compile(pool, arguments)
        out, pool = self._compiled(pool, *arguments)
        return np.asarray(out), pool

    def check(self, batch: Batch) -> np.ndarray:
        """Runs a batch, asserts what it wrote and what padded tokens say, and returns what the real ones say."""
        out, pool = self.run(batch)
        for pages, rows in zip(self.pages(pool), batch.after(), strict=True):
            np.testing.assert_array_equal(
                np.asarray(pages).astype(np.float32), batch.pages(rows).astype(np.float32), type(self).__name__
            )
        np.testing.assert_array_equal(np.delete(out, self.places(batch), axis=0), 0)
        return out[self.places(batch)]

    def memory(self, batch: Batch, num_pages: int) -> tuple[int, Any]:
        """Bytes of a pool of `num_pages`, and what the step compiled for it says of its memory."""
        shape = batch.pages(batch.before()[0]).shape[1:]
        pool = self.pool(*(np.zeros((num_pages, *shape), batch.case.stored_dtype) for _ in range(2)))
        compiled = self._compile(pool, self.arguments(batch))
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pool)), compiled.memory_analysis()

    def _compile(self, pool: Any, arguments: tuple[Any, ...]) -> Any:
        return jax.jit(self._step, donate_argnums=0).lower(pool, *arguments).compile()


def among_layers(pages: np.ndarray) -> jax.Array:
    """A layer's pages among those of other layers, which are NaN."""
    layers = np.full((LAYERS, *pages.shape), np.nan, np.float32).astype(pages.dtype)
    layers[LAYER] = pages
    return jnp.array(layers)
