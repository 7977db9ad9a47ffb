"""Latent attention that can be measured, at DeepSeek's widths: over latent rows (absorbed), and a prompt's heads."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from bench.workloads import DTYPES, MATMUL_TFLOPS, READ_GBPS, random_normal, random_page_table
from jattn_kernels import make_schedule, ragged_extend
from jattn_kernels.mla import mla_decode, mla_extend
from jattn_kernels.packed_latents import TILE, is_packed, packed_width
from jattn_kernels.spec import AttentionSpec

VALUE_DIM, ROTARY_DIM = 512, 64
NOPE_DIM, HEAD_VALUE_DIM = 128, 128  # of the heads that the absorbed form stands for, with as many rotated numbers
_MODEL_SCALE = (NOPE_DIM + ROTARY_DIM) ** -0.5
_DTYPE = "bfloat16"


class LatentArrays(NamedTuple):
    """Arguments of a call; `q` is the part of the queries that has taken up the key's up-projection."""

    q: jax.Array
    q_pe: jax.Array
    latent_pages: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    schedule: Any
    cu_q_lens: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentWorkload:
    """Absorbed attention of random bf16 numbers; fields as in `AttentionWorkload`.

    Attributes:
        q_tokens: Query tokens a sequence of an extend, the last of its `ctx`; None is decode.
        kv: Name of the rows' dtype, or fp8_ds_mla of packed ones; queries are of bf16.
    """

    batch: int
    ctx: int
    hq: int
    page: int = 16
    q_tokens: int | None = None
    kv: str = "bf16"
    chained: ClassVar[tuple[str, ...]] = ("page_table",)

    @property
    def case(self) -> str:
        return "mla_decode" if self.q_tokens is None else "mla_extend"

    @property
    def name(self) -> str:
        q = "" if self.q_tokens is None else f"_q{self.q_tokens}"
        kv = "" if self.kv == "bf16" else f"_{self.kv}"
        return f"{self.case}{kv}_b{self.batch}_ctx{self.ctx}{q}_h{self.hq}_p{self.page}"

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
        packs = is_packed(DTYPES[self.kv])
        width = packed_width(VALUE_DIM, ROTARY_DIM) if packs else VALUE_DIM + ROTARY_DIM
        return self.batch * self.ctx * width * jnp.dtype(DTYPES[self.kv]).itemsize

    @property
    def flops(self) -> int:
        q = self.q_tokens or 1
        pairs = self.batch * (q * self.ctx - q * (q - 1) // 2)
        return 2 * (2 * VALUE_DIM + ROTARY_DIM) * self.hq * pairs

    @property
    def roofline_us(self) -> float:
        return max(self.kv_bytes / READ_GBPS / 1e3, self.flops / MATMUL_TFLOPS / 1e6)

    def fields(self) -> dict[str, Any]:
        """What names this workload in a row of a record."""
        q = {} if self.q_tokens is None else {"q": self.q_tokens}
        kv = {} if self.kv == "bf16" else {"kv_dtype": self.kv}
        return {"case": self.case, "batch": self.batch, **q, "ctx": self.ctx, "hq": self.hq, "page": self.page, **kv}

    def rate(self, time_us: float) -> dict[str, float]:
        """What a call of this duration reaches."""
        gbps, tflops = self.kv_bytes / time_us / 1e3, self.flops / time_us / 1e6
        return {"GBps": round(gbps, 2), "TFLOPs": round(tflops, 2)}

    def arrays(self, pools: int, implementation: str | None) -> LatentArrays:
        """The arguments of an implementation's calls, with `pools` pools side by side."""
        page_table, num_pages = random_page_table((self.ctx,) * self.batch, self.page)
        seq_lens = jnp.full((self.batch,), self.ctx, jnp.int32)
        q_keys, pe_key, row_key = jax.random.split(jax.random.key(0), 3)
        ends = None
        tokens: tuple[int, ...] = (self.batch, 1)
        if self.q_tokens is not None:
            tokens = (self.batch * self.q_tokens,)
            ends = jnp.arange(self.batch + 1, dtype=jnp.int32) * self.q_tokens
        return LatentArrays(
            q=random_normal(q_keys, (*tokens, self.hq, VALUE_DIM), _DTYPE),
            q_pe=random_normal(pe_key, (*tokens, self.hq, ROTARY_DIM), _DTYPE),
            latent_pages=random_rows(row_key, (pools, num_pages, self.page), DTYPES[self.kv]),
            page_table=jnp.asarray(page_table),
            seq_lens=seq_lens,
            schedule=self._schedule(seq_lens, ends, implementation),
            cu_q_lens=ends,
        )

    def _schedule(self, seq_lens: jax.Array, ends: jax.Array | None, implementation: str | None) -> Any:
        return make_schedule(
            seq_lens,
            ends,
            spec=self.spec,
            num_tokens=1 if self.q_tokens is None else self.batch * self.q_tokens,
            dtype=_DTYPE,
            kv_dtype=DTYPES[self.kv],
            page_size=self.page,
            operation="mla_decode" if self.q_tokens is None else "mla_extend",
            max_seq_len=self.ctx,
            implementation=implementation,
        )

    def call(self, arrays: LatentArrays, pool: jax.Array, implementation: str | None) -> jax.Array:
        """One call over one of the pools."""
        facts = {"schedule": arrays.schedule, "implementation": implementation}
        if arrays.cu_q_lens is None:
            out = mla_decode(*arrays[:5], spec=self.spec, layer_index=pool, **facts)
        else:
            out = mla_extend(*arrays[:5], arrays.cu_q_lens, spec=self.spec, layer_index=pool, **facts)
        assert isinstance(out, jax.Array)
        return out


def random_rows(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Rows of normal numbers, one for each place of a shape; packed ones have scales of 1."""
    if not is_packed(dtype):
        return random_normal(key, (*shape, VALUE_DIM + ROTARY_DIM), dtype)
    keys = jax.random.split(key)
    parts = (
        random_normal(keys[0], (*shape, VALUE_DIM), "float8_e4m3fn"),
        jnp.ones((*shape, VALUE_DIM // TILE), jnp.float32),
        random_normal(keys[1], (*shape, ROTARY_DIM), "bfloat16"),
    )
    in_bytes = (jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(*shape, -1) for part in parts)
    return jnp.concatenate([*in_bytes], axis=-1)


class HeadArrays(NamedTuple):
    """Arguments of a call over keys and values that were made of latent rows."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    cu_q_lens: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpandedWorkload:
    """A prompt over keys and values of heads, random bf16 numbers."""

    tokens: int
    hq: int
    q_tokens: ClassVar[int] = 0  # what a timed call asks: this is no decode
    chained: ClassVar[tuple[str, ...]] = ("cu_q_lens",)

    @property
    def name(self) -> str:
        return f"expanded_q{self.tokens}_h{self.hq}x{NOPE_DIM + ROTARY_DIM}-{HEAD_VALUE_DIM}"

    @property
    def spec(self) -> AttentionSpec:
        width = NOPE_DIM + ROTARY_DIM
        return AttentionSpec(
            num_q_heads=self.hq, num_kv_heads=self.hq, head_dim=width, v_head_dim=HEAD_VALUE_DIM, sm_scale=_MODEL_SCALE
        )

    @property
    def kv_bytes(self) -> int:
        """Of keys and values, once."""
        return self.tokens * self.hq * (NOPE_DIM + ROTARY_DIM + HEAD_VALUE_DIM) * jnp.dtype(_DTYPE).itemsize

    @property
    def flops(self) -> int:
        pairs = self.tokens * (self.tokens + 1) // 2
        return 2 * (NOPE_DIM + ROTARY_DIM + HEAD_VALUE_DIM) * self.hq * pairs

    @property
    def roofline_us(self) -> float:
        return max(self.kv_bytes / READ_GBPS / 1e3, self.flops / MATMUL_TFLOPS / 1e6)

    def fields(self) -> dict[str, Any]:
        """What names this workload in a row of a record."""
        widths = {"d": NOPE_DIM + ROTARY_DIM, "v_d": HEAD_VALUE_DIM}
        return {"case": "expanded", "batch": 1, "q": self.tokens, "ctx": self.tokens, "hq": self.hq, **widths}

    def rate(self, time_us: float) -> dict[str, float]:
        """What a call of this duration reaches."""
        return {"TFLOPs": round(self.flops / time_us / 1e6, 2)}

    def arrays(self, pools: int, implementation: str | None) -> HeadArrays:
        """The arguments of a call: the same ones for all, which are more than the L2 holds."""
        del pools, implementation
        widths = (NOPE_DIM + ROTARY_DIM, NOPE_DIM + ROTARY_DIM, HEAD_VALUE_DIM)
        keys = jax.random.split(jax.random.key(0), len(widths))
        rows = (
            random_normal(key, (self.tokens, self.hq, width), _DTYPE) for key, width in zip(keys, widths, strict=True)
        )
        return HeadArrays(*rows, cu_q_lens=jnp.asarray([0, self.tokens], jnp.int32))

    def call(self, arrays: HeadArrays, pool: jax.Array, implementation: str | None) -> jax.Array:
        """One call."""
        del pool
        ends = arrays.cu_q_lens
        out = ragged_extend(*arrays[:3], ends, ends, spec=self.spec, implementation=implementation)
        assert isinstance(out, jax.Array)
        return out
