"""The mailbox of the GPUs of a host that share a model: memory through which their kernels exchange sums.

Kernels store into it behind XLA's back, so its array is never handed to a step; steps are handed addresses.
"""

import ctypes
import dataclasses
import functools
import threading
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jattn.device_mesh import mesh_of, spans_processes
from jattn.parallel import Parallel
from jattn.progress import logger
from jattn_kernels.inbox import EMPTY, FAILED, HEADER, Inbox
from jattn_kernels.triton.implementation import missing

_SIZES = (2, 4, 8)  # groups of devices that the kernels are tested for


class PeerTable(nnx.Variable):
    """Of each device its row of `Inbox.table`, one behind the other: a leaf of a model, so that steps get it."""


@dataclasses.dataclass
class Mailbox:
    """An inbox of each device, and the tables by which they find each other's.

    Attributes:
        inbox: What each of them is.
        words: The inboxes, one behind the other.
        table: uint32, a device's row behind the other's.
        loopback: The same with each device in the others' place: for the first run of a step, in which kernels are
            loaded and graphs made, before a device waits for another.
        turn: Held while a step is enqueued: all devices must run the steps of a process's engines in one order. And
            while inboxes are filled without an exchange, until that is done. One of all mailboxes, which may have
            devices in common.
        emptied: How often it has been.
    """

    inbox: Inbox
    words: jax.Array
    table: jax.Array
    loopback: jax.Array
    emptied: int = 0
    turn: ClassVar[threading.RLock] = threading.RLock()

    def looped(self, leaf: Any) -> Any:
        """A model's leaf; the loopback table in the place of the table."""
        return self.loopback if leaf is self.table else leaf

    def waited_in_vain(self) -> list[int]:
        """The numbers of devices that gave up waiting for another."""
        with self.turn:  # else its memory may be handed on meanwhile, to be emptied
            shards = sorted(self.words.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            return [rank for rank, shard in enumerate(shards) if np.asarray(_failed(shard.data))]

    def check(self) -> None:
        """Raises if a device has given up.

        Raises:
            RuntimeError: One has; what was computed since is NaN.
        """
        if devices := self.waited_in_vain():
            raise RuntimeError(
                f"Device {', '.join(map(str, devices))} of {self.inbox.devices} that share the model waited some "
                "seconds for another one, which did not take part in a step: it hangs or has failed."
            )

    def empty(self) -> None:
        """Makes all inboxes as they were at first, in place, once the steps under way have run.

        Raises:
            RuntimeError: XLA moved them, so that tables do not hold any more.
        """
        before, sharding = _addresses(self.words), self.words.sharding
        fill = functools.partial(_as_at_first, self.inbox)
        emptied = jax.jit(fill, donate_argnums=0, keep_unused=True, out_shardings=sharding)
        with self.turn:  # a device runs it behind its steps, of whichever engine
            self.words = jax.block_until_ready(emptied(self.words))
            self.emptied += 1
        if _addresses(self.words) != before:
            raise RuntimeError("The devices' inboxes are elsewhere than steps were told: start the process again.")


def mailbox_of(parallel: Parallel) -> Mailbox | None:
    """The mailbox of devices, made once in a process; None where they exchange by XLA's collectives."""
    with Mailbox.turn:
        return _made(parallel)


@functools.cache
def _made(parallel: Parallel) -> Mailbox | None:
    if sentence := refuses(parallel):
        if parallel.axis is not None and jax.default_backend() == "gpu":
            logger.warning("Sums of devices go through XLA's collectives, which end a step's CUDA graph. %s", sentence)
        return None
    inbox, sharding = parallel.inbox, NamedSharding(mesh_of(parallel), PartitionSpec(parallel.axis))
    words = jax.block_until_ready(jax.jit(functools.partial(_as_at_first, inbox), out_shardings=sharding)())
    tables = (inbox.table(_addresses(words), loopback=loopback) for loopback in (False, True))
    table, loopback = (jax.device_put(rows.reshape(-1), sharding) for rows in tables)
    return Mailbox(inbox, words, table, loopback)


def refuses(parallel: Parallel) -> str | None:
    """Why devices cannot exchange by kernels, in a sentence, or None."""
    if parallel.axis is None or jax.default_backend() != "gpu":
        return "Kernels exchange between several NVIDIA GPUs."
    if parallel.size not in _SIZES:
        return f"Kernels exchange between {', '.join(map(str, _SIZES))} GPUs, not {parallel.size}."
    if spans_processes(parallel):
        return "Kernels exchange between GPUs of one process."
    devices = list(mesh_of(parallel).devices.flat)
    pairs = ((a, b) for a in devices for b in devices if a is not b)
    apart = next((f"{a.id} does not reach GPU {b.id}'s" for a, b in pairs if not _reaches(a, b)), None)
    return f"GPU {apart} memory, by the driver." if apart else missing()


def connect(model: Any, parallel: Parallel) -> None:
    """Lets the devices that share a model exchange by their mailbox, if there is one and the model takes it."""
    if hasattr(model, "peers") and (mailbox := mailbox_of(parallel)) is not None:
        model.peers = nnx.data(PeerTable(mailbox.table))


def _reaches(device: Any, other: Any) -> bool:
    """Whether the driver lets one GPU store into another's memory."""
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceCanAccessPeer
    except OSError:  # a GPU that is not NVIDIA's
        return False
    reaches = ctypes.c_int(0)
    return ask(ctypes.byref(reaches), device.local_hardware_id, other.local_hardware_id) == 0 and bool(reaches.value)


def _addresses(words: jax.Array) -> list[int]:
    jax.block_until_ready(words)  # to ask for a pointer waits too, and holds Python's lock meanwhile
    by_place = {shard.index[0].start or 0: shard.data.unsafe_buffer_pointer() for shard in words.addressable_shards}
    return [by_place[place] for place in sorted(by_place)]


def _as_at_first(inbox: Inbox, before: jax.Array | None = None) -> jax.Array:
    """All inboxes without an exchange; `before` is what their memory holds, which is not looked at."""
    del before
    own = jnp.where(jnp.arange(inbox.words) < HEADER, jnp.uint32(0), jnp.uint32(EMPTY))
    return jnp.tile(own, inbox.devices)


@jax.jit
def _failed(inbox: jax.Array) -> jax.Array:
    return inbox[FAILED]
