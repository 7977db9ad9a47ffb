"""The plans of steps as several devices run them: one program on all, each with its shares of weights and pool.

Each device keeps the loop state and chooses the tokens for itself. They come to the same, as all have the same bits of
what they are computed from.
"""

import dataclasses
from typing import Any

from jattn.compiled_steps import StepPlan
from jattn.device_mesh import OnAll
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


def on_mesh(plans: dict[Any, StepPlan], parallel: Parallel) -> dict[Any, StepPlan]:
    """The plans for the devices of `parallel`, with the arguments of all; by `StepKey`."""
    if parallel.axis is None:
        return plans
    mapped = {}
    for key, plan in plans.items():
        held, given = _HELD.get(key.kind, _OF_A_PASS[0]), _GIVEN.get(key.kind, _OF_A_PASS[1])
        takes_shares = (*held, *(False for _ in plan.arguments[len(held) :]))
        function = OnAll(plan.function, parallel, takes_shares=takes_shares, gives_shares=given)
        mapped[key] = dataclasses.replace(plan, function=function)
    return mapped
