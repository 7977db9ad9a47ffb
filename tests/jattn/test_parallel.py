"""Parallel is the identity on one device, and on several it shares, sums and gathers along its axis."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jattn.parallel import ONE_DEVICE, Parallel

SEVERAL = Parallel(axis="devices", size=2)


def on_devices(function, x):
    """`function` on each row of `x`, each row on a device of its own."""
    return jax.vmap(function, axis_name="devices")(x)


def test_one_device_keeps_everything():
    logits = jnp.arange(6.0).reshape(2, 3)
    assert ONE_DEVICE.share(7, "heads") == 7
    assert ONE_DEVICE.all_reduce(logits) is logits
    assert ONE_DEVICE.gather_logits(logits) is logits


def test_several_devices_share_evenly():
    assert SEVERAL.share(6, "heads") == 3


@pytest.mark.parametrize(("count", "share"), [(6, 3), (2, 1), (1, 1)])
def test_fewer_heads_of_keys_than_devices_are_on_several(count, share):
    assert SEVERAL.share_of_keys(count, "heads") == share
    assert ONE_DEVICE.share_of_keys(count, "heads") == count


def test_heads_of_keys_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"heads must divide by the number of devices, or that by it\. Got 3"):
        SEVERAL.share_of_keys(3, "heads")


def test_several_devices_sum_their_parts():
    parts = jnp.array([[1.0, 2.0], [30.0, 40.0]])
    chex.assert_trees_all_equal(on_devices(SEVERAL.all_reduce, parts), jnp.array([[31.0, 42.0]] * 2))


def test_what_several_devices_all_have_is_summed_once():
    whole = jnp.array([1.0, jnp.nan])
    summed = on_devices(lambda x: SEVERAL.all_reduce(SEVERAL.once(x)), jnp.stack([whole] * 2))
    chex.assert_trees_all_equal(summed, jnp.stack([whole] * 2))
    assert ONE_DEVICE.once(whole) is whole


def test_several_devices_gather_whole_rows():
    logits = jnp.arange(12.0).reshape(3, 4)  # three sequences; each device holds half of the vocabulary
    parts = jnp.stack(jnp.split(logits, 2, axis=1))
    chex.assert_trees_all_equal(on_devices(SEVERAL.gather_logits, parts), jnp.stack([logits] * 2))


INF, NAN = jnp.inf, jnp.nan


@pytest.mark.parametrize(
    ("row", "token", "logit"),
    [
        ([1, 3, 2, 0], 1, 3),
        ([1, 0, 2, 4], 3, 4),
        ([1, 5, 5, 4], 1, 5),
        ([-INF, -INF, -INF, -2], 3, -2),
        ([-INF, -INF, -INF, -INF], 0, -INF),
        ([1, 2, 3, INF], 3, INF),
        ([1, NAN, 3, 0], None, INF),
        ([NAN, NAN, NAN, NAN], 0, INF),
        ([-0.0, -1, 0.0, -1], 0, 0),
    ],
)
def test_best_token_of_several_devices_is_that_of_one(row, token, logit):
    """Of one that says how it is broken, which token it is does not count."""
    logits = jnp.array([row, [0, 0, 7, 0]], jnp.float32)
    parts = jnp.stack(jnp.split(logits, 2, axis=1))
    for tokens, best in zip(*on_devices(SEVERAL.best_token, parts), strict=True):
        assert tokens[0] == token or token is None
        chex.assert_trees_all_equal(best, jnp.array([logit, 7], jnp.float32))
        assert tokens[1] == 2
    if token is not None:
        chex.assert_trees_all_equal(ONE_DEVICE.best_token(logits)[0], jnp.array([token, 2], jnp.int32))


def test_uneven_share_is_refused():
    with pytest.raises(ValueError, match=r"key heads must divide by the number of devices. Got 5 over 2 devices"):
        SEVERAL.share(5, "key heads")


@pytest.mark.parametrize(("axis", "size"), [(None, 2), (None, 0), ("devices", 0), ("devices", -1)])
def test_impossible_size_is_refused(axis, size):
    with pytest.raises(ValueError, match=rf"`size` must be at least 1.*Got axis={axis}, size={size}"):
        Parallel(axis=axis, size=size)
