"""LastSent: an array that most launches take unchanged, kept on the device."""

import jax
import numpy as np


class LastSent:
    """Sends an array only if it differs from the last one.

    A transfer starts when the launches before it have ended, and the next one waits for it: 12 us of a decode step's
    4,371 on an H200 (one request, Llama-3-8B shapes), and 6 of 6,387 with 8 requests.

    Args:
        sharding: Where to; None is wherever `jax.device_put` puts it.
    """

    def __init__(self, sharding: jax.sharding.Sharding | None = None):
        self._sharding = sharding
        self._last: tuple[np.ndarray, jax.Array] | None = None

    def __call__(self, array: np.ndarray) -> jax.Array:
        """The array on the device. Neither it nor what is returned may be changed or donated."""
        if self._last is None or not np.array_equal(array, self._last[0]):
            self._last = array, jax.device_put(array, self._sharding)  # at once: an interrupt may come in between
        return self._last[1]
