"""The plans of steps as several devices run them, each with its shares of weights and pool.

By a mailbox each device runs a program of its own; else one program is of all.

Each device keeps the loop state and chooses the tokens for itself. They come to the same, as all have the same bits of
what they are computed from.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jattn.compiled_steps import StepPlan, described
from jattn.device_mesh import OnAll, own_devices
from jattn.mailbox import mailbox_of
from jattn.on_each import OfOne, OnEach
from jattn.parallel import Parallel

_HELD = {
    "note": (False,),  # the loop state
    "score": (True,),  # weights
    "sample_decode": (True, False),  # weights and loop state
    "sample_prefill": (True, False),
}
_GIVEN = {
    "note": False,
    "score": False,
    "sample_decode": (False, False),  # loop state and output
    "sample_prefill": (False, False),
}
_OF_A_PASS = (True, False, True), (False, True, False)  # weights, loop state and pool; loop state, pool and output


def devices_apart(parallel: Parallel) -> tuple[Any, ...]:
    """Devices that each run programs of their own, and hold what these take and give apart (`jattn.on_each`)."""
    if parallel.axis is None or mailbox_of(parallel) is None:
        return ()
    return tuple(device for _, device in own_devices(parallel))


def on_mesh(plans: dict[Any, StepPlan], parallel: Parallel) -> dict[Any, StepPlan]:
    """The plans for the devices of `parallel`, by `StepKey`: with the arguments of all, or apart with those of one."""
    if parallel.axis is None:
        return plans
    if devices := devices_apart(parallel):
        return {key: of_one(plan, devices) for key, plan in plans.items()}
    mapped = {}
    for key, plan in plans.items():
        held, given = _HELD.get(key.kind, _OF_A_PASS[0]), _GIVEN.get(key.kind, _OF_A_PASS[1])
        takes_shares = (*held, *(False for _ in plan.arguments[len(held) :]))
        function = OnAll(plan.function, parallel, takes_shares=takes_shares, gives_shares=given)
        mapped[key] = dataclasses.replace(plan, function=function)
    return mapped


def of_one(plan: StepPlan, devices: tuple[Any, ...]) -> StepPlan:
    """The plan of a program that each device runs by itself; what is apart among the arguments is the first one's."""
    arguments = [_of_first(given) if isinstance(given, OnEach) else given for given in plan.arguments]
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return dataclasses.replace(plan, function=OfOne(plan.function), arguments=(*arguments, number), on_each=devices)


def _of_first(given: OnEach) -> Any:
    """Shapes of what the first device has, tied to no device."""
    return jax.tree.map(lambda leaf: described(leaf).update(sharding=None), given.parts[0])
