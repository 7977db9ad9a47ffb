"""What an engine has of the device's memory, as a sum."""

import dataclasses
from typing import Any

import jax

from jattn.compiled_steps import CompiledSteps
from jattn.device_mesh import bytes_on_one, memory_stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on the device, or on each of several that share the model.

    Attributes:
        weights, pool, state: What an engine holds.
        temporaries: What the step that needs most needs beside them, as XLA reckons; steps share it.
        limit: What JAX may take of the device; None where it does not say, as on a CPU.
    """

    weights: int
    pool: int
    state: int
    temporaries: int
    limit: int | None

    @property
    def rest(self) -> int | None:
        """What nobody has asked for: for fragments, and for what libraries take."""
        if self.limit is None:
            return None
        return self.limit - self.weights - self.pool - self.state - self.temporaries

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "pool": self.pool,
            "loop state": self.state,
            "temporaries of steps": self.temporaries,
        }
        if self.rest is not None:
            parts["rest"] = self.rest
        total = self.limit if self.limit is not None else sum(parts.values())
        return " + ".join(f"{name} {_told(size)}" for name, size in parts.items()) + f" = {_told(total)}"


def memory_use(weights: Any, pool: Any, state: Any, steps: CompiledSteps) -> MemoryUse:
    """The sum for an engine's arrays and steps."""
    sizes = (sum(bytes_on_one(leaf) for leaf in jax.tree.leaves(tree)) for tree in (weights, pool, state))
    return MemoryUse(
        **dict(zip(("weights", "pool", "state"), sizes, strict=True)),
        temporaries=steps.temporary_bytes,
        limit=memory_stats().get("bytes_limit"),
    )


def _told(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**29 else f"{size / 2**20:.1f} MiB"
