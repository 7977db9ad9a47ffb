"""Parallel: how one model is split over devices, and the only place where a model meets a collective."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped, UInt32

from jattn_kernels import added, peers, rms_norm
from jattn_kernels.inbox import Inbox
from jattn_kernels.splits import Splits

NO_TOKEN = -1  # in a token's place: logits were not finite, or left no token that may come


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Tensor parallelism as a static fact of a model; the identity on one device.

    A model built with it holds this device's share of the heads and of the hidden units. With `axis` set, its methods
    must run inside `jax.shard_map` over a mesh axis of that name.

    Attributes:
        axis: Name of the mesh axis; None on one device.
        size: Devices along the axis.
        by_expert: Whether each device has some of a mixture's experts whole, not some of each one's hidden units.
        table: This device's row of a mailbox's, while a step is traced: then kernels exchange what XLA's collectives
            do else. Exchanges of a program must depend on one another.
    """

    axis: str | None = None
    size: int = 1
    by_expert: bool = False
    table: UInt32[Array, " columns"] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self):
        if self.size < 1 or (self.axis is None and self.size != 1):
            raise ValueError(
                f"`size` must be at least 1, and 1 without an axis. Got axis={self.axis}, size={self.size}."
            )

    def share(self, count: int, what: str) -> int:
        """This device's part of `count` heads or units.

        Raises:
            ValueError: `count` does not divide by the number of devices.
        """
        if count % self.size:
            raise ValueError(f"{what} must divide by the number of devices. Got {count} over {self.size} devices.")
        return count // self.size

    def share_of_keys(self, count: int, what: str) -> int:
        """This device's part of `count` heads of keys; one, which its neighbours have too, if there are more devices.

        Raises:
            ValueError: Neither divides by the other.
        """
        if count < self.size and self.size % count == 0:
            return 1
        if count % self.size:
            raise ValueError(
                f"{what} must divide by the number of devices, or that by it. Got {count} over {self.size} devices."
            )
        return count // self.size

    def first_of(self, share: int) -> Int[Array, ""] | int:
        """The number of the first of this device's heads or units, of which each device has `share`."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * share

    def connected(self, table: UInt32[Array, " columns"] | None) -> "Parallel":
        """The same devices, exchanging by a mailbox if there is one."""
        return dataclasses.replace(self, table=table)

    @property
    def exchanges(self) -> bool:
        """Whether they exchange by a mailbox, and so add up, norm and exchange in one kernel."""
        return self.table is not None

    @property
    def inbox(self) -> Inbox:
        """The inbox of each of several devices."""
        return Inbox.of(self.size)

    def all_reduce(self, partial: Float[Array, "..."]) -> Float[Array, "..."]:
        """Sum over the devices of what each computed from its share; all get the same bits."""
        if self.axis is None:
            return partial
        if self.table is None:
            return jax.lax.psum(partial, self.axis)
        return peers.all_reduce(partial, self.table, inbox=self.inbox)

    def add_and_norm(
        self,
        x: Float[Array, "T D"],
        partial: Float[Array, "T D"] | Splits,
        scale: Float[Array, "..."],
        *,
        eps: float,
        offset: float,
        layer_index: Int[Array, ""] | int | None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """x and the sum over the devices of what each adds to it, and the `rms_norm` of that."""
        options: dict[str, Any] = {"eps": eps, "offset": offset, "layer_index": layer_index}
        if self.table is not None:
            return peers.all_reduce_add_norm(x, partial, scale, self.table, inbox=self.inbox, **options)
        total = x + self.all_reduce(added(partial))
        return total, rms_norm(total, scale, **options)

    def once(self, whole: Float[Array, "..."]) -> Float[Array, "..."]:
        """What every device has all of, as a part of what is summed over them: itself on the first, 0 on the others."""
        return whole if self.axis is None else jnp.where(jax.lax.axis_index(self.axis) == 0, whole, 0)

    def gather_logits(self, logits: Float[Array, "B V_local"]) -> Float[Array, "B V"]:
        """Whole rows of logits from each device's part of the vocabulary."""
        if self.axis is None:
            return logits
        if self.table is None:
            return jax.lax.all_gather(logits, self.axis, axis=-1, tiled=True)
        return jnp.concatenate(list(self._gathered(logits)), axis=-1)

    def best_token(self, logits: Float32[Array, "B V_local"]) -> Int32[Array, " B"]:
        """The likeliest token of each row; devices exchange it and its logit, not the logits.

        Of equal ones it is that of the lowest id. It is NO_TOKEN where a logit is NaN or inf, or all are -inf.
        """
        token, best = _best_of(logits)
        if self.axis is None:
            return token
        pair = jnp.stack([token + self.first_of(logits.shape[-1]), jax.lax.bitcast_convert_type(best, jnp.int32)])
        tokens, words = jnp.moveaxis(self._gathered(pair), 1, 0)
        logits_of_devices = jax.lax.bitcast_convert_type(words, jnp.float32)
        winner = jnp.argmax(logits_of_devices, axis=0)[None]
        token, best = (jnp.take_along_axis(each, winner, axis=0)[0] for each in (tokens, logits_of_devices))
        return jnp.where(jnp.isfinite(best), token, NO_TOKEN)  # nor is there one where the exchange gave NaN

    def _gathered(self, x: Shaped[Array, "..."]) -> Shaped[Array, "devices ..."]:
        """The devices' arrays of numbers of 32 bits."""
        if self.table is None:
            return jax.lax.all_gather(x, self.axis)
        return peers.all_gather(x, self.table, inbox=self.inbox)


def _best_of(logits: Float32[Array, "B V"]) -> tuple[Int32[Array, " B"], Float32[Array, " B"]]:
    """The likeliest token of each row or NO_TOKEN, and its logit; inf where any is NaN or inf.

    In one pass over the logits: what is not finite comes before all tokens, and all tokens before -inf.
    """

    def better(left, right):
        (token, logit), (other_token, other) = left, right
        stays = (logit > other) | ((logit == other) & (token < other_token))
        return jnp.where(stays, token, other_token), jnp.where(stays, logit, other)

    is_finite = logits < jnp.inf  # or -inf, which NO_TOKEN of the same logit comes before
    tokens = jnp.where(is_finite, jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1), NO_TOKEN)
    none = jnp.int32(NO_TOKEN), jnp.float32(-jnp.inf)
    return jax.lax.reduce((tokens, jnp.where(is_finite, logits, jnp.inf)), none, better, (1,))


ONE_DEVICE = Parallel()
