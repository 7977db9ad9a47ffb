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

_ALONE = "note"  # the kind of step in which devices do not exchange
_SCORE = "score"  # takes the weights alone
_CHOICES = ("sample_decode", "sample_prefill")  # those that take weights and state; others take the pool too
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
            if key.kind != _ALONE:
                num_held = 1 if key.kind == _SCORE else 2 if key.kind in _CHOICES else 3
                self._empty_batches[key] = plan.arguments[num_held:]

    def run(self, keys: Iterable[Any], steps: CompiledSteps, weights: Any, state: Any, pool: Any) -> tuple[Any, Any]:
        """Runs those of these steps that have not run, if they are compiled; returns state and pool."""
        for key in keys:
            if key not in self._empty_batches or key not in steps:
                continue
            batch, alone = self._empty_batches.pop(key), jax.tree.map(self._mailbox.looped, weights)
            for _ in range(_RUNS):
                if key.kind == _SCORE:
                    jax.block_until_ready(steps(key, alone, *batch))
                elif key.kind in _CHOICES:
                    state, _ = jax.block_until_ready(steps(key, alone, state, *batch))
                else:
                    state, pool, _ = jax.block_until_ready(steps(key, alone, state, pool, *batch))
        return state, pool
