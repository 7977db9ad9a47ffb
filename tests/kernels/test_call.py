"""What is derived from the optional arguments of a call."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels.call import AttentionOptions

LENS = jnp.array([13, 0, 5], jnp.int32)


@pytest.mark.parametrize(
    ("given", "q_lens", "q_start", "kv_start"),
    [
        ({}, 2, [11, -2, 3], [0, 0, 0]),
        ({}, [5, 0, 5], [8, 0, 0], [0, 0, 0]),
        ({"kv_start": [4, 0, 7]}, 1, [16, -1, 11], [4, 0, 7]),
        ({"q_start": [1, 2, 3]}, 1, [1, 2, 3], [0, 0, 0]),
        ({"q_start": [1, 2, 3], "kv_start": [4, 0, 7]}, 1, [1, 2, 3], [4, 0, 7]),
    ],
)
def test_starts_default_to_queries_that_end_where_the_keys_do(given, q_lens, q_start, kv_start):
    options = AttentionOptions(**{name: jnp.array(value, jnp.int32) for name, value in given.items()})
    q_lens = q_lens if isinstance(q_lens, int) else jnp.array(q_lens, jnp.int32)
    found = options.starts(LENS, q_lens)
    np.testing.assert_array_equal(found[0], q_start)
    np.testing.assert_array_equal(found[1], kv_start)
    assert {x.dtype for x in found} == {jnp.dtype("int32")}
