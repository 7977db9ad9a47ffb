"""LastSent: an array is sent again only if it has changed."""

import jax
import numpy as np
import pytest

from jattn.serving.executor.last_sent import LastSent

PLAN = np.arange(6, dtype=np.int32).reshape(2, 3)


def test_equal_array_is_not_sent_again():
    send = LastSent()
    sent = send(PLAN)
    assert isinstance(sent, jax.Array)
    assert send(PLAN.copy()) is sent


@pytest.mark.parametrize("other", [PLAN + 1, PLAN[:1], PLAN.reshape(3, 2)])
def test_other_array_is_sent_and_then_kept(other):
    send = LastSent()
    send(PLAN)
    sent = send(other)
    np.testing.assert_array_equal(sent, other)
    assert send(other.copy()) is sent
    np.testing.assert_array_equal(send(PLAN), PLAN)


def test_interrupted_transfer_leaves_the_last_array(monkeypatch):
    send, other = LastSent(), PLAN + 1
    sent = send(PLAN)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            send(other)
    assert send(PLAN) is sent
    np.testing.assert_array_equal(send(other), other)
