"""A segment's loop over layers, with layers that only say what they leave."""

from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.matmul import Splits, added
from jattn.parallel import ONE_DEVICE
from jattn_models import decoder
from jattn_models.attention import Pass
from jattn_models.decoder_layer import DecoderLayer, Stream
from jattn_models.layers import ReadInPlace

WIDTH = 8


def splits(parts, number):
    """Of one row: so many equal parts of a number, and rows of 0."""
    whole = jnp.zeros((parts, 4, WIDTH), jnp.float32).at[:, 0].set(number / parts)
    return Splits(parts=whole, num_rows=1, dtype=jnp.dtype("float32"))


class Layer(DecoderLayer):
    """Leaves 1 to be added, in two parts, though it says that it would leave one; or leaves nothing and adds it."""

    def __init__(self, leaves):
        self.leaves = leaves
        self.mlp = None
        self.scale = ReadInPlace(jnp.ones((2, 1)))

    def hands_on(self, rows, parallel):
        return True

    def left(self, normed, parallel):
        return splits(1, 0.0)

    def __call__(self, stream, layer_index, this_pass, pool, following=None):
        rows = stream.summed(ONE_DEVICE)
        return (Stream(rows, splits(2, 1.0)) if self.leaves else Stream(rows + 1.0)), pool


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("unrolled", [True, False])
def test_what_a_segment_has_left_is_added_by_the_next_one(leaves, unrolled):
    """Whatever shape the next segment's own layers leave theirs in."""
    this_pass = mock.Mock(spec=Pass, parallel=ONE_DEVICE)
    this_pass.forward_batch = mock.Mock(unrolled=unrolled, input_ids=jnp.zeros(1, jnp.int32))
    stream = Stream(jnp.ones((1, WIDTH)), splits(1, 10.0))
    stream, _ = decoder._scanned([Layer(leaves)], [range(2)], stream, this_pass, None)
    total = stream.rows if stream.addition is None else stream.rows + added(stream.addition)
    np.testing.assert_array_equal(total, jnp.full((1, WIDTH), 1.0 + 10.0 + 2.0))
