"""The order in which Hopper's kernel reads the inputs of weights in int4, 32 at a time.

A thread reads 8 neighbouring numbers at once, and the tensor cores want pairs of each of four threads: numbers i and
i + 4 of its 8 are one, as a mask takes them out of 32 bits together. Weights that lie so are multiplied with rows as
they are.
"""

from jaxtyping import Array, Shaped

INPUTS = 32  # whose order is another
_THREADS, _PAIRS = 4, 4


def interleaved(values: Shaped[Array, "*L D"]) -> Shaped[Array, "*L D"]:
    """Inputs, a multiple of 32 of them, in that order."""
    blocks = values.reshape(*values.shape[:-1], -1, _PAIRS, _THREADS, 2)
    first = blocks.ndim - 3
    return blocks.transpose(*range(first), first + 1, first + 2, first).reshape(values.shape)


def in_turn(values: Shaped[Array, "*L D"]) -> Shaped[Array, "*L D"]:
    """Inputs in their own order, of what `interleaved` gives.

    Also the order of a row's numbers that is multiplied with weights which are not interleaved, as if they were.
    """
    blocks = values.reshape(*values.shape[:-1], -1, _THREADS, 2, _PAIRS)
    first = blocks.ndim - 3
    return blocks.transpose(*range(first), first + 2, first, first + 1).reshape(values.shape)
