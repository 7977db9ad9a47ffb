"""Work lists of decode: every key in exactly one part, parts of nearly equal size, within the static bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn_kernels import AttentionSpec, make_schedule
from jattn_kernels.schedule import split_evenly

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)


@given(lens=st.lists(st.integers(0, 400), min_size=1, max_size=12), parts=st.integers(1, 20))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_split_gives_each_tile_to_one_part(lens, parts):
    schedule = split_evenly(jnp.array(lens, jnp.int32), block_kv=16, parts=parts)
    items, offsets = np.asarray(schedule.items), np.asarray(schedule.offsets)
    tiles = [-(-length // 16) for length in lens]
    assert items.shape == (len(lens) + parts, 3)
    assert offsets[-1] <= len(items)
    for sequence, count in enumerate(tiles):
        own = items[offsets[sequence] : offsets[sequence + 1]]
        assert (own[:, 0] == sequence).all()
        assert [tile for _, first, end in own for tile in range(first, end)] == list(range(count))
    assert (items[offsets[-1] :, 1] == items[offsets[-1] :, 2]).all()
    assert (items[:, 2] - items[:, 1]).max() <= max(1, -(-sum(tiles) // parts))


@pytest.mark.parametrize(("lens", "counts"), [((640, 640), [2, 2]), ((1280, 16), [4, 1]), ((0, 64), [0, 4])])
def test_split_cuts_what_is_longer_than_its_share(lens, counts):
    schedule = split_evenly(jnp.array(lens, jnp.int32), block_kv=16, parts=4)
    assert jnp.diff(schedule.offsets).tolist() == counts


def test_split_is_the_same_in_jit():
    lens = jnp.array([7, 300, 0, 64], jnp.int32)
    expected = split_evenly(lens, block_kv=64, parts=3)
    traced = jax.jit(lambda lens: split_evenly(lens, block_kv=64, parts=3))(lens)
    assert jax.tree.structure(traced) == jax.tree.structure(expected)
    np.testing.assert_array_equal(traced.items, expected.items)


def test_make_schedule_is_none_where_the_implementation_needs_none():
    lens, offsets = jnp.array([5], jnp.int32), jnp.array([0, 5], jnp.int32)
    facts = {"spec": SPEC, "dtype": jnp.bfloat16, "page_size": 16, "implementation": "xla"}
    assert make_schedule(lens, num_tokens=1, **facts) is None
    assert make_schedule(lens, offsets, num_tokens=5, **facts) is None
