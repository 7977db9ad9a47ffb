"""What dispatch knows of a call, and what an implementation offers."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn_kernels.spec import AttentionSpec

Operation = Literal["paged_decode", "paged_extend", "ragged_extend", "mla_decode", "mla_extend", "rotate_and_write"]


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The optional arguments of an attention call; a field that was not given is None."""

    layer_index: Int[Array, ""] | int | None = None
    q_start: Int[Array, " B"] | None = None
    kv_start: Int[Array, " B"] | None = None
    q_positions: Int[Array, "..."] | None = None
    custom_mask: Bool[Array, " M"] | None = None
    q_scale: Float[Array, "..."] | None = None
    k_scale: Float[Array, "..."] | None = None
    v_scale: Float[Array, "..."] | None = None
    alibi_slopes: Float[Array, " N"] | None = None
    sinks: Float[Array, " N"] | None = None
    schedule: Any = None

    def given(self) -> frozenset[str]:
        """Names of the arguments that were given."""
        names = (field.name for field in dataclasses.fields(self))
        return frozenset(name for name in names if getattr(self, name) is not None)

    def starts(
        self, seq_lens: Int[Array, " B"], q_lens: Int[Array, " B"] | int
    ) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """`q_start` and `kv_start`, or what stands for those that were not given: the queries end where the keys do."""
        kv_start = jnp.zeros_like(seq_lens) if self.kv_start is None else self.kv_start
        return kv_start + seq_lens - q_lens if self.q_start is None else self.q_start, kv_start


@dataclasses.dataclass(frozen=True)
class Device:
    """The kind of device that a call is compiled for.

    Attributes:
        platform: "cpu", "gpu", ...
        compute_capability: (major, minor) of an NVIDIA GPU, else None.
        num_sms: Streaming multiprocessors of a GPU, if JAX knows.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    num_sms: int | None = None


def default_device() -> Device:
    """The kind of JAX's default device, now."""
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability is None:
        return Device(device.platform)
    major, minor = str(capability).split(".")
    return Device(device.platform, (int(major), int(minor)), getattr(device, "core_count", None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The static facts of one attention call; hashable.

    Attributes:
        operation: The face that was called.
        spec: The layer's facts.
        q_dtype: Name of the queries' dtype.
        kv_dtype: Name of the keys' and values' dtype.
        page_size: Tokens a page; None if keys and values are not paged.
        num_tokens: Query tokens a sequence in decode, if known.
        features: Names of the optional arguments that were given.
        device: What the call runs on.
    """

    operation: Operation
    spec: AttentionSpec
    q_dtype: str
    kv_dtype: str
    page_size: int | None
    num_tokens: int | None = None
    features: frozenset[str] = frozenset()
    device: Device = dataclasses.field(default_factory=default_device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to serve attention calls.

    Attributes:
        name: What `implementation` is set to.
        refuses: Says in a sentence why a call cannot be served, or returns None.
        operations: For each operation the function (*arrays, options, spec=..., page_size=... if paged) -> (out, lse),
            arrays as the face takes them.
        schedules: For each operation that reads a work list the function (seq_lens, cu_q_lens, spec=...,
            num_tokens=..., kv_itemsize=..., max_seq_len=...) -> schedule.
    """

    name: str
    refuses: Callable[[AttentionCall], str | None]
    operations: Mapping[Operation, Callable[..., Any]]
    schedules: Mapping[Operation, Callable[..., Any]] = dataclasses.field(default_factory=dict)
