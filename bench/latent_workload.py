"""Decode over latent rows (absorbed MLA) that can be measured, at DeepSeek's widths."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from bench.workloads import MATMUL_TFLOPS, READ_GBPS, random_normal, random_page_table
from jattn_kernels import make_schedule
from jattn_kernels.mla import mla_decode
from jattn_kernels.spec import AttentionSpec

VALUE_DIM, ROTARY_DIM = 512, 64
_MODEL_SCALE = 192**-0.5  # of the heads that the absorbed form stands for: 128 without position and 64 with
_DTYPE = "bfloat16"


class LatentArrays(NamedTuple):
    """Arguments of a call; `q` is the part of the queries that has taken up the key's up-projection."""

    q: jax.Array
    q_pe: jax.Array
    latent_pages: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    schedule: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentWorkload:
    """Absorbed decode of random bf16 numbers; fields as in `AttentionWorkload`."""

    batch: int
    ctx: int
    hq: int
    page: int = 16
    q_tokens: ClassVar[None] = None  # what a timed call asks of `AttentionWorkload`: this is a decode
    two_passes: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"mla_decode_b{self.batch}_ctx{self.ctx}_h{self.hq}_p{self.page}"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=self.hq,
            num_kv_heads=1,
            head_dim=VALUE_DIM + ROTARY_DIM,
            v_head_dim=VALUE_DIM,
            sm_scale=_MODEL_SCALE,
        )

    @property
    def kv_bytes(self) -> int:
        """Of the rows, which are read once for keys and values."""
        return self.batch * self.ctx * (VALUE_DIM + ROTARY_DIM) * jnp.dtype(_DTYPE).itemsize

    @property
    def flops(self) -> int:
        return 2 * (2 * VALUE_DIM + ROTARY_DIM) * self.hq * self.batch * self.ctx

    @property
    def roofline_us(self) -> float:
        return max(self.kv_bytes / READ_GBPS / 1e3, self.flops / MATMUL_TFLOPS / 1e6)

    def fields(self) -> dict[str, Any]:
        """What names this workload in a row of a record."""
        return {"case": "mla_decode", "batch": self.batch, "ctx": self.ctx, "hq": self.hq, "page": self.page}

    def rate(self, time_us: float) -> dict[str, float]:
        """What a call of this duration reaches."""
        gbps, tflops = self.kv_bytes / time_us / 1e3, self.flops / time_us / 1e6
        return {"GBps": round(gbps, 2), "TFLOPs": round(tflops, 2)}

    def arrays(self, pools: int, implementation: str | None) -> LatentArrays:
        """The arguments of an implementation's calls, with `pools` pools side by side."""
        page_table, num_pages = random_page_table((self.ctx,) * self.batch, self.page)
        seq_lens = jnp.full((self.batch,), self.ctx, jnp.int32)
        q_keys, pe_key, row_key = jax.random.split(jax.random.key(0), 3)
        width = VALUE_DIM + ROTARY_DIM
        return LatentArrays(
            q=random_normal(q_keys, (self.batch, 1, self.hq, VALUE_DIM), _DTYPE),
            q_pe=random_normal(pe_key, (self.batch, 1, self.hq, ROTARY_DIM), _DTYPE),
            latent_pages=random_normal(row_key, (pools, num_pages, self.page, width), _DTYPE),
            page_table=jnp.asarray(page_table),
            seq_lens=seq_lens,
            schedule=self._schedule(seq_lens, implementation),
        )

    def _schedule(self, seq_lens: jax.Array, implementation: str | None) -> Any:
        return make_schedule(
            seq_lens,
            spec=self.spec,
            num_tokens=1,
            dtype=_DTYPE,
            page_size=self.page,
            operation="mla_decode",
            max_seq_len=self.ctx,
            implementation=implementation,
        )

    def call(self, arrays: LatentArrays, pool: jax.Array, implementation: str | None) -> jax.Array:
        """One call over one of the pools."""
        out = mla_decode(
            *arrays[:5],
            spec=self.spec,
            layer_index=pool,
            schedule=arrays.schedule,
            implementation=implementation,
        )
        assert isinstance(out, jax.Array)
        return out
