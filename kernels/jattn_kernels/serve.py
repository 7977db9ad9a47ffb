"""What all attention faces end in: the call as one value, the implementation for it, its schedule checked."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jattn_kernels.call import AttentionCall, Operation, Schedule, modes_of
from jattn_kernels.dispatch import choose
from jattn_kernels.operands import AttentionOperands
from jattn_kernels.shapes.arrays import brief
from jattn_kernels.spec import AttentionSpec


def attend(
    operation: Operation,
    operands: AttentionOperands,
    *,
    spec: AttentionSpec,
    page_size: int | None,
    schedule: Any = None,
    return_lse: bool,
    implementation: str | None,
) -> Any:
    """Serves one call, whose operands have been checked.

    Raises:
        ValueError: `implementation` is unknown, or `schedule` is not for this call.
        NotImplementedError: No implementation, or not the one asked for, serves it.
    """
    q, lens = operands.q, operands.cu_q_lens if operands.seq_lens is None else operands.seq_lens
    call = AttentionCall(
        operation=operation,
        spec=spec,
        q_dtype=q.dtype.name,
        kv_dtype=operands.k.dtype.name,
        page_size=page_size,
        num_tokens=q.shape[1 if operation.endswith("decode") else 0],
        num_seqs=lens.shape[0] - (operands.seq_lens is None),
        features=operands.options.given(),
        modes=modes_of(operands),
    )
    chosen = choose(call, implementation).implementation
    if schedule is not None:
        work = work_of(schedule, call, chosen.name)
        operands = operands.with_options(schedule=work)
    out, lse = chosen.run(call, _without_derivative(operands))
    return (out, lse) if return_lse else out


def work_of(schedule: Any, call: AttentionCall, implementation: str) -> Any:
    """The work list of a schedule; that of another call would have a kernel read what is not there."""
    if not isinstance(schedule, Schedule):
        raise ValueError(f"`schedule` must be None or what `make_schedule` makes. Got {brief(schedule)}.")
    if schedule.implementation != implementation:
        raise ValueError(
            "`schedule` must be made for calls that the same implementation serves: `make_schedule` must be told "
            f"their `features` and `implementation`. Got one of {schedule.implementation!r}, the call is served by "
            f"{implementation!r}."
        )
    wanted = call.for_schedule()
    if schedule.call != wanted:
        names = [name for name in vars(wanted) if getattr(schedule.call, name) != getattr(wanted, name)]
        made, asked = (
            ", ".join(f"{name}={getattr(facts, name)}" for name in names) for facts in (schedule.call, wanted)
        )
        raise ValueError(
            "`schedule` must be what `make_schedule` makes for as many sequences and tokens, the dtypes and the spec "
            f"of the call. Got one for {made}, the call has {asked}."
        )
    return schedule.work


def _without_derivative(operands: AttentionOperands) -> AttentionOperands:
    """The operands, of which a derivative ends in a sentence; what is lowered stays the same."""
    leaves, tree = jax.tree.flatten(operands)
    places = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer) and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if not places:
        return operands
    for place, leaf in zip(places, _same(*(leaves[i] for i in places)), strict=True):
        leaves[place] = leaf
    return tree.unflatten(leaves)


@jax.custom_jvp
def _same(*arrays: Any) -> tuple[Any, ...]:
    return arrays


@_same.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise NotImplementedError(
        "Attention here has no derivative: its kernels are for inference. Use another attention to train a model."
    )
