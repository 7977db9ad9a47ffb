"""First runs of the steps of several GPUs: each device by itself, before one waits for another in a kernel.

A step loads its kernels when it runs for the first time, and makes its graph when it runs for the second; for either a
GPU may wait for what others are doing, and these may be waiting for it, in an exchange. So a step runs twice on the
loopback table and an empty batch, which leaves state and pool as they are.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jattn.compiled_steps import CompiledSteps, StepPlan
from jattn.mailbox import Mailbox

# Steps in which devices exchange: what they take of the engine's before a batch, and give back behind their output.
_OF_A_PASS, _OF_A_CHOICE = ("weights", "state", "pool"), ("weights", "state")
_HELD = {
    "decode": _OF_A_PASS,
    "prefill": _OF_A_PASS,
    "forward_decode": _OF_A_PASS,
    "forward_prefill": _OF_A_PASS,
    "sample_decode": _OF_A_CHOICE,
    "sample_prefill": _OF_A_CHOICE,
}
_RUNS = 2  # XLA launches kernel by kernel the first time, and a graph from the second on


class FirstRuns:
    """Which steps have run, and runs others.

    Args:
        mailbox: The devices'.
    """

    def __init__(self, mailbox: Mailbox):
        self._mailbox = mailbox
        self._empty_batches: dict[Any, tuple[Any, ...]] = {}

    def expect(self, plans: Mapping[Any, StepPlan]) -> None:
        """Takes note of steps that have not run."""
        for key, plan in plans.items():
            if key.kind in _HELD:
                self._empty_batches[key] = plan.arguments[len(_HELD[key.kind]) :]

    def run(self, keys: Iterable[Any], steps: CompiledSteps, weights: Any, state: Any, pool: Any) -> tuple[Any, Any]:
        """Runs those of these steps that have not run, if they are compiled; returns state and pool."""
        for key in keys:
            if key not in self._empty_batches or key not in steps:
                continue
            names, batch = _HELD[key.kind], self._empty_batches.pop(key)
            held = {"weights": jax.tree.map(self._mailbox.looped, weights), "state": state, "pool": pool}
            for _ in range(_RUNS):
                _, *given = jax.block_until_ready(steps(key, *(held[name] for name in names), *batch))
                held |= zip(names[1:], given, strict=True)
            state, pool = held["state"], held["pool"]
        return state, pool
