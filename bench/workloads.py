"""Attention that can be measured: the bytes and FLOPs of each workload, and its arrays, made on the device."""

import dataclasses
import functools
import math
import random
from collections import Counter
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn_kernels import make_schedule, merge_state, paged_decode, paged_extend, ragged_extend
from jattn_kernels.spec import AttentionSpec, PageLayout

# Measured on an H200 with torch: a maximum over 4 GB, and large bf16 products of random numbers.
READ_GBPS = 4386.0
MATMUL_TFLOPS = 740.0

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "float8_e4m3fn", "fp8_ds_mla": "uint8"}
Batch = int | Literal["ragged64", "mixed"]


def ragged64_lens() -> tuple[int, ...]:
    """Lengths of the batch that the peers' file calls "ragged64": log-uniform, 464,554 tokens in all."""
    r = random.Random(0)
    return tuple(round(math.exp(r.uniform(math.log(128), math.log(32768)))) for _ in range(64))


class Arrays(NamedTuple):
    """Arguments of an attention call; the pages of `pools` pools lie on a leading layer axis.

    Attributes:
        schedule: As `make_schedule` gives it: all layers of a step share it, and the peers' plan is not timed either.
        rows: Keys and values of the query tokens themselves, where they are not read from pages.
    """

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    cu_q_lens: jax.Array
    schedule: Any
    rows: tuple[jax.Array, jax.Array] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionWorkload:
    """Attention over a paged cache of random numbers in random page order; fields named as in the peers' files.

    Attributes:
        batch: Sequences; "mixed" is 60 that decode over 4,096 keys and 4 that begin with 2,048 tokens, in one prefill.
        ctx: Keys a sequence; 0 for "ragged64" and "mixed", which have their own lengths.
        q_tokens: Query tokens a sequence of a prefill, 0 for "mixed"; None is decode, with `verify`.
        kv: Name of the keys' dtype.
        q: Name of the queries' dtype; that of the keys if None, but bf16 where they are fp8.
        verify: Query tokens a sequence of decode.
        window: Keys before its own that a token sees; None is all.
        chunk: Tokens a chunk, of which a token sees its own one's; None is no chunks.
        rope: Whether queries and keys are rotated in the kernel.
        two_passes: Whether a prefill's own keys come as rows, in a pass merged with one over the pages before them.
        invariant: Whether a sequence's result must not depend on its neighbours, to the bit.
    """

    batch: Batch
    ctx: int
    q_tokens: int | None = None
    hq: int = 32
    hkv: int = 8
    d: int = 128
    page: int = 16
    kv: str = "bf16"
    q: str | None = None
    layout: PageLayout = "NHD"
    verify: int = 1
    window: int | None = None
    chunk: int | None = None
    rope: bool = False
    two_passes: bool = False
    invariant: bool = False

    @property
    def case(self) -> str:
        return "decode" if self.q_tokens is None else "prefill"

    @property
    def name(self) -> str:
        q = "" if self.q_tokens is None else f"_q{self.q_tokens}"
        more = "".join(
            (
                "" if self.layout == "NHD" else f"_{self.layout}",
                "" if self.verify == 1 else f"_verify{self.verify}",
                "" if self.window is None else f"_window{self.window}",
                "" if self.chunk is None else f"_chunk{self.chunk}",
                "_rope" if self.rope else "",
                "_two-passes" if self.two_passes else "",
                "_invariant" if self.invariant else "",
                "" if self.q is None else f"_q-{self.q}",
            )
        )
        return f"{self.case}_{self.kv}_b{self.batch}_ctx{self.ctx}{q}_h{self.hq}-{self.hkv}x{self.d}_p{self.page}{more}"

    @property
    def chained(self) -> tuple[str, ...]:
        """Arrays that an extend is given of a call before it, where they are unrolled."""
        return ("page_table", "cu_q_lens") if self.two_passes else ("page_table",)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        match self.batch:
            case "ragged64":
                return ragged64_lens()
            case "mixed":
                return tuple(kv for _, kv in _MIXED)
        return (self.ctx,) * self.batch

    @property
    def q_lens(self) -> tuple[int, ...]:
        if self.batch == "mixed":
            return tuple(q for q, _ in _MIXED)
        return (self.verify if self.q_tokens is None else self.q_tokens,) * len(self.kv_lens)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=self.hq,
            num_kv_heads=self.hkv,
            head_dim=self.d,
            page_layout=self.layout,
            window_left=self.window,
            chunk_size=self.chunk,
            rope_theta=_ROPE_THETA if self.rope else None,
            causal=not self.two_passes,  # of the pages, which all lie before
            batch_invariant=self.invariant,
        )

    @property
    def seen_lens(self) -> tuple[int, ...]:
        """Keys of each sequence that its last token sees."""
        return tuple(int(self._seen(length - 1)) for length in self.kv_lens)

    @property
    def paged_lens(self) -> tuple[int, ...]:
        """Keys behind each row of the page table."""
        return self.kv_lens

    def _seen(self, position: Any) -> Any:
        """How many keys a token at a position, or at each of some, sees."""
        seen = position + 1
        if self.window is not None:
            seen = np.minimum(seen, self.window + 1)
        return seen if self.chunk is None else np.minimum(seen, position % self.chunk + 1)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of real tokens that are seen."""
        return 2 * sum(self.seen_lens) * self.hkv * self.d * jnp.dtype(DTYPES[self.kv]).itemsize

    @property
    def flops(self) -> int:
        """Of the pairs of a query and a key that it sees, both products."""
        lens = Counter(zip(self.q_lens, self.kv_lens, strict=True))
        pairs = sum(count * int(self._seen(np.arange(kv - q, kv)).sum()) for (q, kv), count in lens.items())
        return 4 * self.d * self.hq * pairs

    @property
    def roofline_us(self) -> float:
        return max(self.kv_bytes / READ_GBPS / 1e3, self.flops / MATMUL_TFLOPS / 1e6)

    def fields(self) -> dict[str, Any]:
        """What names this workload in a row of a record."""
        shape = {"batch": self.batch, "ctx": self.ctx}
        if self.q_tokens is not None:
            shape = {"batch": self.batch, "q": self.q_tokens, "kv": self.ctx}
        fields = {"case": self.case, **shape, "hq": self.hq, "hkv": self.hkv, "d": self.d, "page": self.page}
        if self.q_tokens is None:
            fields |= {"kv": self.kv, "kv_MB": round(self.kv_bytes / 1e6, 4), "tokens": sum(self.kv_lens)}
        more = {
            "layout": (self.layout, "NHD"),
            "q_tokens": (self.verify, 1),
            "window": (self.window, None),
            "chunk": (self.chunk, None),
            "rope": (self.rope, False),
            "two_passes": (self.two_passes, False),
            "batch_invariant": (self.invariant, False),
            "q_dtype": (self.q, None),
        }
        if self.q_tokens is not None:
            more["kv_dtype"] = (self.kv, "bf16")
        return fields | {name: value for name, (value, plain) in more.items() if value != plain}

    def rate(self, time_us: float) -> dict[str, float]:
        """What a call of this duration reaches, in the unit of its case."""
        if self.q_tokens is None:
            return {"GBps": round(self.kv_bytes / time_us / 1e3, 2)}
        return {"TFLOPs": round(self.flops / time_us / 1e6, 2)}

    def arrays(self, pools: int, implementation: str | None) -> Arrays:
        """The arguments of an implementation's calls, with `pools` pools side by side."""
        page_table, num_pages = random_page_table(self.paged_lens, self.page)
        q_dtype = DTYPES[self.q or ("bf16" if self.kv.startswith("fp8") else self.kv)]
        batch_size, num_tokens = len(self.kv_lens), sum(self.q_lens)
        page = (self.page, self.hkv) if self.layout == "NHD" else (self.hkv, self.page)
        keys = jax.random.split(jax.random.key(0), 3)
        # Decode calls feed each other their outputs as queries: values this large keep those near 1.
        v_size = math.sqrt(sum(self.seen_lens) / batch_size / math.e) if self.q_tokens is None else 1.0
        q_shape = (batch_size, self.verify) if self.q_tokens is None else (num_tokens,)
        pages = (pools, num_pages, *page, self.d)
        before = self.q_lens if self.two_passes else (0,) * batch_size
        seq_lens = jnp.asarray(self.kv_lens, jnp.int32) - jnp.asarray(before, jnp.int32)
        rows = None
        if self.two_passes:
            k_rows, v_rows = (random_normal(key, (num_tokens, self.hkv, self.d), DTYPES[self.kv]) for key in keys[1:])
            rows = k_rows, v_rows
        cu_q_lens = jnp.asarray(np.cumsum((0, *self.q_lens)), jnp.int32)
        return Arrays(
            q=random_normal(keys[0], (*q_shape, self.hq, self.d), q_dtype),
            k_pages=random_normal(keys[1], pages, DTYPES[self.kv]),
            v_pages=random_normal(keys[2], pages, DTYPES[self.kv], size=v_size),
            page_table=jnp.asarray(page_table),
            seq_lens=seq_lens,
            cu_q_lens=cu_q_lens,
            schedule=self.work_list(
                seq_lens,
                cu_q_lens,
                spec=self.spec,
                num_tokens=self.verify if self.q_tokens is None else num_tokens,
                dtype=q_dtype,
                kv_dtype=DTYPES[self.kv],
                page_size=self.page,
                implementation=implementation,
            ),
            rows=rows,
        )

    def work_list(self, seq_lens: jax.Array, cu_q_lens: jax.Array, **facts: Any) -> Any:
        """What the calls take for `schedule`, of the facts that `make_schedule` wants."""
        ends = None if self.q_tokens is None else cu_q_lens
        return make_schedule(seq_lens, ends, max_seq_len=max(self.kv_lens), **facts)

    def call(self, arrays: Arrays, pool: jax.Array, implementation: str | None) -> jax.Array:
        """One call over one of the pools."""
        arguments = {
            "spec": self.spec,
            "layer_index": pool,
            "schedule": arrays.schedule,
            "implementation": implementation,
        }
        if arrays.rows is not None:
            lse_too = {"return_lse": True, "implementation": implementation}
            own_spec = dataclasses.replace(self.spec, causal=True)
            ends = arrays.cu_q_lens
            own = ragged_extend(arrays.q, *arrays.rows, ends, ends, spec=own_spec, **lse_too)
            out, _ = merge_state(*paged_extend(*arrays[:6], **arguments | lse_too), *own)
        elif self.q_tokens is None:
            out = paged_decode(*arrays[:5], **arguments)
        else:
            out = paged_extend(*arrays[:6], **arguments)
        assert isinstance(out, jax.Array)
        return out


def random_page_table(kv_lens: tuple[int, ...], page_size: int) -> tuple[np.ndarray, int]:
    """Pages for sequences of these lengths in random order, and how many there are; page 0 pads."""
    counts = [-(-length // page_size) for length in kv_lens]
    pages = 1 + np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    table = np.zeros((len(kv_lens), max(counts)), np.int32)
    for row, part in zip(table, np.split(pages, np.cumsum(counts)[:-1]), strict=True):
        row[: len(part)] = part
    return table, 1 + sum(counts)


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_normal(key: jax.Array, shape: tuple[int, ...], dtype: str, size: float = 1.0) -> jax.Array:
    """Normal numbers of this size; stacked arrays are made one at a time, so that the float32 ones stay small."""

    def part(key, shape):
        if math.prod(shape) > _MOST_AT_ONCE:
            return random_normal(key, shape, dtype, size)
        most = float(jnp.finfo(dtype).max)  # fp8 would make NaN of what is beyond
        return jnp.clip(jax.random.normal(key, shape, jnp.float32) * jnp.float32(size), -most, most).astype(dtype)

    if len(shape) < 3:
        return part(key, shape)
    return jax.lax.map(lambda key: part(key, shape[1:]), jax.random.split(key, shape[0]))


_MOST_AT_ONCE = 2**31
_ROPE_THETA = 5e5
_MIXED = ((1, 4096),) * 60 + ((2048, 2048),) * 4  # query tokens and keys of each sequence
