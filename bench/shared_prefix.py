"""Decode of sequences that share their first keys, as a workload: those keys are counted, and read, once for all."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bench.workloads import Arrays, AttentionWorkload
from jattn_kernels import shared_prefix_decode, shared_prefix_schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPrefixWorkload(AttentionWorkload):
    """A decode whose sequences share their first `prefix` keys of `ctx`, by one pass over those and one over the rest.

    The page table's first row is the prefix.
    """

    prefix: int

    @property
    def name(self) -> str:
        return f"{super().name}_prefix{self.prefix}"

    @property
    def paged_lens(self) -> tuple[int, ...]:
        return (self.prefix, *(length - self.prefix for length in self.kv_lens))

    @property
    def kv_bytes(self) -> int:
        return super().kv_bytes // sum(self.kv_lens) * sum(self.paged_lens)

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"shared_prefix": self.prefix}

    def work_list(self, seq_lens: jax.Array, cu_q_lens: jax.Array, **facts: Any) -> Any:
        return shared_prefix_schedule(jnp.int32(self.prefix), seq_lens - self.prefix, **facts)

    def call(self, arrays: Arrays, pool: jax.Array, implementation: str | None) -> jax.Array:
        out = shared_prefix_decode(
            *arrays[:3],
            arrays.page_table[0],
            jnp.int32(self.prefix),
            arrays.page_table[1:],
            arrays.seq_lens - self.prefix,
            spec=self.spec,
            schedule=arrays.schedule,
            layer_index=pool,
            implementation=implementation,
        )
        assert isinstance(out, jax.Array)
        return out
