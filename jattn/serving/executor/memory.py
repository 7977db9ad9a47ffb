"""What an engine has of the device's memory, as a sum."""

import dataclasses
from typing import Any

import jax

from jattn.compiled_steps import CompiledSteps
from jattn.device_mesh import bytes_on_one, memory_stats
from jattn.kv_pool import KVPool


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on the device, or on each of several that share the model.

    Attributes:
        weights, pool, state: What an engine holds.
        pool_tokens: Tokens whose keys the pool has places for, in each of its page lists.
        temporaries: What the step that needs most needs beside them, as XLA reckons; steps share it.
        limit: What JAX may take of the device; None where it does not say, as on a CPU.
    """

    weights: int
    pool: int
    state: int
    temporaries: int
    limit: int | None
    pool_tokens: tuple[int, ...] = ()

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
        told = {name: f"{name} {_told(size)}" for name, size in parts.items()}
        if self.pool_tokens:
            tokens, *of_windows = (f"{number:,}" for number in self.pool_tokens)
            told["pool"] += f" ({tokens} tokens{''.join(f', {number} in a window' for number in of_windows)})"
        return " + ".join(told.values()) + f" = {_told(total)}"


def memory_use(weights: Any, pool: KVPool, state: Any, steps: CompiledSteps) -> MemoryUse:
    """The sum for an engine's arrays and steps."""
    tokens = {group.page_list: group.num_slots - group.page_size for group in pool.groups}  # but for page 0
    sizes = (sum(bytes_on_one(leaf) for leaf in jax.tree.leaves(tree)) for tree in (weights, pool, state))
    return MemoryUse(
        **dict(zip(("weights", "pool", "state"), sizes, strict=True)),
        temporaries=steps.temporary_bytes,
        limit=memory_stats().get("bytes_limit"),
        pool_tokens=tuple(tokens[number] for number in sorted(tokens)),
    )


def _told(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**29 else f"{size / 2**20:.1f} MiB"
