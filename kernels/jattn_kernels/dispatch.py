"""Which implementation serves a call, and why."""

import contextlib
from collections.abc import Collection
from typing import Any, NamedTuple

import jax.numpy as jnp

from jattn_kernels.call import AttentionCall, Call, Operation
from jattn_kernels.implementation import Implementation
from jattn_kernels.mosaic import MOSAIC
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.triton import TRITON
from jattn_kernels.xla import XLA

# In order of preference.
_registered: list[Implementation] = [MOSAIC, TRITON, XLA]


def implementations() -> tuple[Implementation, ...]:
    """All that are registered, the preferred ones first."""
    return tuple(_registered)


def register(implementation: Implementation, *, before: str | None = None) -> contextlib.ExitStack:
    """Adds an implementation, whose name must be new.

    Args:
        before: Name of the one that it is preferred to; None puts it last.

    Returns:
        A context manager whose end, or whose `close`, takes the implementation out again.

    Raises:
        ValueError: The name is taken, or `before` names none.
    """
    names = [entry.name for entry in _registered]
    if implementation.name in names:
        raise ValueError(f"`implementation` must have a name of its own. Got name={implementation.name!r}.")
    if before is not None and before not in names:
        raise ValueError(f"`before` must be None or one of: {', '.join(names)}. Got before={before!r}.")
    _registered.insert(len(names) if before is None else names.index(before), implementation)
    registration = contextlib.ExitStack()
    registration.callback(_registered.remove, implementation)
    return registration


class Choice(NamedTuple):
    """The implementation that serves a call, and the sentence that says why."""

    implementation: Implementation
    reason: str


def choose(
    call: Call,
    implementation: str | None = None,
    *,
    among: tuple[Implementation, ...] | None = None,
) -> Choice:
    """The implementation for a call: the one asked for, or the first that does not refuse.

    Args:
        among: Those to choose from; the registered ones if None.

    Raises:
        ValueError: `implementation` names none of them.
        NotImplementedError: The one asked for refuses, or all do; the message has the sentence of each.
    """
    among = implementations() if among is None else among
    names = [entry.name for entry in among]
    if implementation is not None and implementation not in names:
        choices = ", ".join(names)
        raise ValueError(f"`implementation` must be None or one of: {choices}. Got implementation={implementation!r}.")
    refusals = {entry.name: entry.refuses(call) for entry in among}
    candidates = [entry for entry in among if implementation in (None, entry.name)]
    for entry in candidates:
        if refusals[entry.name] is None:
            return Choice(entry, _reason(entry.name, implementation, refusals))
    sentences = " ".join(sentence for entry in candidates if (sentence := refusals[entry.name]))
    able = [name for name, refusal in refusals.items() if refusal is None]
    advice = f"Use implementation={able[0]!r}." if able else "No implementation serves this call."
    raise NotImplementedError(f"{sentences} {advice}")


def serves(call: Call, implementation: str | None = None) -> bool:
    """Whether `choose` finds an implementation for a call."""
    return any(entry.name == (implementation or entry.name) and not entry.refuses(call) for entry in implementations())


def works_per_sequence(
    operation: Operation,
    *,
    spec: AttentionSpec,
    dtype: Any,
    page_size: int | None,
    kv_dtype: Any = None,
    features: Collection[str] = (),
    implementation: str | None = None,
) -> bool:
    """Whether what serves such calls does for each sequence the work that its own length asks for, and no more.

    Args:
        dtype: Of the queries.
        kv_dtype: Of keys and values; that of the queries if None.
        features: Names of the optional arguments that will be given.

    Raises:
        ValueError, NotImplementedError: As `choose`.
    """
    call = AttentionCall(
        operation=operation,
        spec=spec,
        q_dtype=jnp.dtype(dtype).name,
        kv_dtype=jnp.dtype(dtype if kv_dtype is None else kv_dtype).name,
        page_size=page_size,
        features=frozenset(features),
    )
    return operation in choose(call, implementation).implementation.per_sequence_work


def is_served(
    operation: Operation,
    *,
    spec: AttentionSpec,
    dtype: Any,
    page_size: int | None,
    kv_dtype: Any = None,
    implementation: str | None = None,
    num_tokens: int | None = None,
    absorbed: int | None = None,
) -> bool:
    """Whether such calls are served, by what is asked for if that is one.

    Args:
        dtype: Of queries.
        kv_dtype: Of keys and values; that of the queries if None.
        num_tokens, absorbed: As of AttentionCall.

    Raises:
        ValueError: As `choose`.
    """
    call = AttentionCall(
        operation=operation,
        spec=spec,
        q_dtype=jnp.dtype(dtype).name,
        kv_dtype=jnp.dtype(dtype if kv_dtype is None else kv_dtype).name,
        page_size=page_size,
        num_tokens=num_tokens,
        absorbed=absorbed,
    )
    with contextlib.suppress(NotImplementedError):
        return bool(choose(call, implementation))
    return False


def _reason(name: str, asked: str | None, refusals: dict[str, str | None]) -> str:
    if asked is not None:
        return f"`{name}` was asked for."
    passed_over = []
    for other, refusal in refusals.items():
        if other == name:
            break
        passed_over.append(refusal or "")
    return " ".join([f"`{name}` is the first choice that serves this call.", *passed_over])
