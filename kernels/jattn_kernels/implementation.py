"""What an implementation offers, and the operands that it is given."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jattn_kernels.call import Call
from jattn_kernels.mixture_operands import ExpertsOperands
from jattn_kernels.mlp_operands import MlpOperands
from jattn_kernels.operands import (
    AttentionOperands,
    FiltersOperands,
    LatentRowOperands,
    MatmulOperands,
    NormOperands,
    RotaryOperands,
    TokenOperands,
)

Operands = (
    AttentionOperands
    | RotaryOperands
    | TokenOperands
    | LatentRowOperands
    | NormOperands
    | ExpertsOperands
    | MatmulOperands
    | MlpOperands
    | FiltersOperands
)


def _no_schedule(call: Any, seq_lens: Any, cu_q_lens: Any, max_seq_len: int | None) -> None:
    """Of implementations that need none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to serve calls; jit-able, with nothing but what it is given.

    Attributes:
        name: What `implementation` is set to.
        refuses: Says in a sentence why a call cannot be served, or returns None.
        run: (call, operands) -> (out, lse) of attention, and what their faces return of the other operations.
        make_schedule: (call, seq_lens, cu_q_lens, max_seq_len) -> work list that `options.schedule` will be, or None;
            the call is as `for_schedule` gives it.
        per_sequence_work: Operations that do for each sequence the work that its own length asks for, and no more.
    """

    name: str
    refuses: Callable[[Call], str | None]
    run: Callable[[Any, Any], Any]
    make_schedule: Callable[..., Any] = _no_schedule
    per_sequence_work: frozenset[str] = frozenset()


_MODES = {
    "jax_enable_x64": "does not run under `jax_enable_x64`: its kernels count in int32.",
    "check_vma": "does not run in a `shard_map` that tracks what varies: give it check_vma=False.",
}


def refuses_mode(name: str, call: Call) -> str | None:
    """Why kernels that are no operations of XLA cannot serve a call in the modes of JAX that it is traced in, or None.

    Args:
        name: Of the implementation.
    """
    return next((f"`{name}` {sentence}" for mode, sentence in _MODES.items() if mode in call.modes), None)
