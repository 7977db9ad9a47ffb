"""Random batches that every surface serves: one description, its numbers, and what the oracle says of them."""

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jattn.forward_batch import ForwardMode
from jattn_kernels import reference
from jattn_kernels.spec import AttentionSpec, PageLayout

N, K, H, SCALE = 4, 2, 32, 0.25
CONTEXT, NUM_REQUESTS, ROWS, REAL_ROWS, MIXED_PREFILLS, NUM_DRAFT = 160, 6, 5, 4, 2, 3
LAYERS, LAYER = 2, 1
NOWHERE = np.iinfo(np.int32).max
K_SCALE, V_SCALE = np.float32(0.05), np.array([0.02, 0.04], np.float32)
FP8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
MODES = {
    "decode": ForwardMode.DECODE,
    "verify": ForwardMode.TARGET_VERIFY,
    "extend": ForwardMode.EXTEND,
    "mixed": ForwardMode.MIXED,
}
Mode = Literal["decode", "verify", "extend", "mixed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is static of a batch and of the layer that it goes through.

    Attributes:
        mode: "verify" has NUM_DRAFT tokens a row; "mixed" has prefills, then decodes.
        page_size: Tokens a page.
        page_layout: Of the pool.
        window_left: Keys to the left, own one not counted; None is off.
        logits_soft_cap: None is off.
        chunk_size: Tokens a chunk; None is off.
        kv_cache_dtype: "auto", which is float32, or a name of FP8, with scales then.
    """

    mode: Mode
    page_size: int = 16
    page_layout: PageLayout = "NHD"
    window_left: int | None = None
    logits_soft_cap: float | None = None
    chunk_size: int | None = None
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        """For the test's id."""
        rules = {"window": self.window_left, "cap": self.logits_soft_cap, "chunk": self.chunk_size}
        rule = "".join(f"_{name}_{value:g}" for name, value in rules.items() if value is not None)
        dtype = "" if self.kv_cache_dtype == "auto" else f"_{self.kv_cache_dtype}"
        return f"{self.mode}{rule}{dtype}_page_{self.page_size}_{self.page_layout}"

    @property
    def q_len(self) -> int | None:
        """Tokens of every row; None where they are ragged."""
        return {"decode": 1, "verify": NUM_DRAFT}.get(self.mode)

    @property
    def num_tokens(self) -> int:
        """Tokens of the bucket."""
        return 48 if self.q_len is None else ROWS * self.q_len

    @property
    def num_prefills(self) -> int:
        """Real rows that are prefills; they come first."""
        return {"extend": REAL_ROWS, "mixed": MIXED_PREFILLS}.get(self.mode, 0)

    @property
    def max_pages(self) -> int:
        """Width of a page table."""
        return -(-CONTEXT // self.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of the pool; more than the requests have."""
        return 1 + NUM_REQUESTS * self.max_pages + 2

    @property
    def stored_dtype(self) -> Any:
        """Of the pool."""
        return jnp.dtype(FP8.get(self.kv_cache_dtype, jnp.float32))

    @property
    def scales(self) -> tuple[Any, Any]:
        """What keys and values in fp8 are stored divided by; None and None elsewhere."""
        return (None, None) if self.kv_cache_dtype == "auto" else (jnp.asarray(K_SCALE), jnp.asarray(V_SCALE))

    @property
    def spec(self) -> AttentionSpec:
        """The layer's facts in the oracle's words."""
        return AttentionSpec(
            num_q_heads=N,
            num_kv_heads=K,
            head_dim=H,
            sm_scale=SCALE,
            logits_soft_cap=self.logits_soft_cap,
            window_left=self.window_left,
            chunk_size=self.chunk_size,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of ROWS rows, REAL_ROWS real ones first; tokens row by row.

    Attributes:
        q_lens, kv_lens: Of each row, this pass's tokens included; 0 is padding.
        requests: The row of `page_table` that each row has.
        page_table: Scattered pages of every request, none of them 0.
        q, k, v: Of the real tokens.
        k_before, v_before, k_after, v_after: By slot what the pool stores, NaN wherever no token is.
        out: What the oracle says.
    """

    case: Case
    q_lens: np.ndarray
    kv_lens: np.ndarray
    requests: np.ndarray
    page_table: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_before: np.ndarray
    v_before: np.ndarray
    k_after: np.ndarray
    v_after: np.ndarray
    out: np.ndarray

    @property
    def prefix_lens(self) -> np.ndarray:
        """Keys of each row from before this pass."""
        return self.kv_lens - self.q_lens

    @property
    def starts(self) -> np.ndarray:
        """Where each row's tokens begin; in a decode or verify padded rows have as many as the others."""
        lens = self.q_lens if self.case.q_len is None else np.full(ROWS, self.case.q_len)
        return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)

    @functools.cached_property
    def req_to_token(self) -> np.ndarray:
        """Token slots by request and position."""
        size = self.case.page_size
        return (self.page_table[:, :, None] * size + np.arange(size)).reshape(NUM_REQUESTS, -1)[:, :CONTEXT]

    @property
    def slots(self) -> np.ndarray:
        """Where each real token's key and value go."""
        rows = zip(self.requests, self.prefix_lens, self.kv_lens, strict=True)
        return np.concatenate([self.req_to_token[request, first:end] for request, first, end in rows])

    def padded(self, values: np.ndarray, fill: Any = np.nan) -> np.ndarray:
        """Values of the real tokens as those of the bucket."""
        whole = np.full((self.case.num_tokens, *values.shape[1:]), fill, values.dtype)
        whole[: len(values)] = values
        return whole

    def pages(self, rows: np.ndarray) -> np.ndarray:
        """Rows by slot as pages in the case's layout."""
        pages = rows.reshape(-1, self.case.page_size, *rows.shape[1:])
        return pages.swapaxes(1, 2) if self.case.page_layout == "HND" else pages


def make_batch(case: Case, seed: int) -> Batch:
    """A random batch of a case; all batches of a case have the same shapes."""
    rng = np.random.default_rng(seed)
    q_lens = rng.integers(1, 13, REAL_ROWS) if case.q_len is None else np.full(REAL_ROWS, case.q_len)
    prefixes = rng.integers(1, CONTEXT - 16, REAL_ROWS)
    if case.mode == "mixed":
        q_lens[:MIXED_PREFILLS] = rng.integers(1, 21, MIXED_PREFILLS)
        q_lens[MIXED_PREFILLS:] = 1
    if case.num_prefills:
        prefixes[rng.integers(case.num_prefills)] = 0
    q_lens, prefixes = (np.pad(x, (0, ROWS - REAL_ROWS)) for x in (q_lens, prefixes))
    kv_lens = np.minimum(q_lens + prefixes, CONTEXT)
    order = 1 + rng.permutation(case.num_pages - 1)[: NUM_REQUESTS * case.max_pages]
    tokens, slots = int(q_lens.sum()), case.num_pages * case.page_size
    q, k, v = (rng.normal(size=(tokens, heads, H)).astype(np.float32) for heads in (N, K, K))
    nothing = np.full((slots, K, H), np.nan, np.float32).astype(case.stored_dtype)
    batch = Batch(
        case=case,
        q_lens=q_lens.astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
        requests=rng.permutation(NUM_REQUESTS)[:ROWS].astype(np.int32),
        page_table=order.reshape(NUM_REQUESTS, -1).astype(np.int32),
        q=q,
        k=k,
        v=v,
        k_before=nothing,
        v_before=nothing,
        k_after=nothing,
        v_after=nothing,
        out=np.zeros(q.shape),
    )
    old = np.concatenate([
        batch.req_to_token[request, :length]
        for request, length in zip(batch.requests, batch.prefix_lens, strict=True)
    ])  # fmt: skip
    before, after = [], []
    for rows, scale in zip((k, v), case.scales, strict=True):
        before.append(nothing.copy())
        before[-1][old] = rng.normal(size=(len(old), K, H)).astype(case.stored_dtype)
        after.append(before[-1].copy())
        divisor = np.float32(1) if scale is None else np.asarray(scale).reshape(-1, 1)
        after[-1][batch.slots] = (rows / divisor).astype(case.stored_dtype)
    written = dict(zip(("k_before", "v_before", "k_after", "v_after"), (*before, *after), strict=True))
    batch = dataclasses.replace(batch, **written)
    return dataclasses.replace(batch, out=_oracle(batch))


def _oracle(batch: Batch) -> np.ndarray:
    out = np.zeros(batch.q.shape)
    ends = np.cumsum(batch.q_lens)
    for row in range(REAL_ROWS):
        at = slice(ends[row] - batch.q_lens[row], ends[row])
        keys = batch.req_to_token[batch.requests[row], : batch.kv_lens[row]]
        k, v = (
            rows[keys].astype(np.float64) * (1 if scale is None else np.asarray(scale).reshape(-1, 1))
            for rows, scale in zip((batch.k_after, batch.v_after), batch.case.scales, strict=True)
        )
        bounds = np.array([0, batch.q_lens[row]]), np.array([0, batch.kv_lens[row]])
        out[at] = np.asarray(reference.ragged_extend(batch.q[at], k, v, *bounds, spec=batch.case.spec))
    return out
