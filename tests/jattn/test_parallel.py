"""Parallel is the identity on one device, and on several it shares, sums and gathers along its axis."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jattn.parallel import NO_TOKEN, ONE_DEVICE, Parallel

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
    ("row", "token"),
    [
        ([1, 3, 2, 0], 1),
        ([1, 0, 2, 4], 3),
        ([1, 5, 5, 4], 1),
        ([-INF, -INF, -INF, -2], 3),
        ([-INF, -INF, -2, -INF], 2),
        ([-INF, -INF, -INF, -INF], NO_TOKEN),
        ([1, 2, 3, INF], NO_TOKEN),
        ([1, NAN, 3, 0], NO_TOKEN),
        ([0, 1, -INF, NAN], NO_TOKEN),
        ([NAN, NAN, NAN, NAN], NO_TOKEN),
        ([NAN, -INF, -INF, INF], NO_TOKEN),
        ([-0.0, -1, 0.0, -1], 0),
    ],
)
def test_best_token_of_several_devices_is_that_of_one(row, token):
    logits = jnp.array([row, [0, 0, 7, 0]], jnp.float32)
    expected = jnp.array([token, 2], jnp.int32)
    parts = jnp.stack(jnp.split(logits, 2, axis=1))
    chex.assert_trees_all_equal(on_devices(SEVERAL.best_token, parts), jnp.stack([expected] * 2))
    chex.assert_trees_all_equal(ONE_DEVICE.best_token(logits), expected)


def test_there_is_no_best_token_where_the_exchange_of_logits_failed(monkeypatch):
    monkeypatch.setattr(Parallel, "_gathered", lambda self, x: jnp.full((2, *x.shape), 0x7FC00000, jnp.int32))
    tokens = on_devices(SEVERAL.best_token, jnp.zeros((2, 3, 4)))
    chex.assert_trees_all_equal(tokens, jnp.full((2, 3), NO_TOKEN))


def test_uneven_share_is_refused():
    with pytest.raises(ValueError, match=r"key heads must divide by the number of devices. Got 5 over 2 devices"):
        SEVERAL.share(5, "key heads")


@pytest.mark.parametrize(("axis", "size"), [(None, 2), (None, 0), ("devices", 0), ("devices", -1)])
def test_impossible_size_is_refused(axis, size):
    with pytest.raises(ValueError, match=rf"`size` must be at least 1.*Got axis={axis}, size={size}"):
        Parallel(axis=axis, size=size)
