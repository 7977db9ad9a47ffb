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
LONGEST_ENCODER, DRAFT_STEP, DRAFT_STEPS = 40, 1, 3
LAYERS, LAYER = 2, 1
NOWHERE = np.iinfo(np.int32).max
K_SCALE, V_SCALE = np.float32(0.05), np.array([0.02, 0.04], np.float32)
FP8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
MODES = {
    "decode": ForwardMode.DECODE,
    "draft_decode": ForwardMode.DECODE,
    "idle": ForwardMode.IDLE,
    "verify": ForwardMode.TARGET_VERIFY,
    "extend": ForwardMode.EXTEND,
    "draft_extend": ForwardMode.DRAFT_EXTEND,
    "mixed": ForwardMode.MIXED,
}
Mode = Literal["decode", "draft_decode", "idle", "verify", "extend", "draft_extend", "mixed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is static of a batch and of the layer that it goes through.

    Attributes:
        mode: "verify" has NUM_DRAFT tokens a row; "mixed" has prefills, then decodes; "draft_decode" is a later step of
            drafting, and "idle" has no real rows.
        page_size: Tokens a page.
        page_layout: Of the pool.
        window_left: Keys to the left, own one not counted; None is off.
        logits_soft_cap: None is off.
        chunk_size: Tokens a chunk; None is off.
        kv_cache_dtype: "auto", which is float32, or a name of FP8, with scales then.
        cross: The layer sees the keys of an encoder, all of them; those of prefills come with the batch.
    """

    mode: Mode
    page_size: int = 16
    page_layout: PageLayout = "NHD"
    window_left: int | None = None
    logits_soft_cap: float | None = None
    chunk_size: int | None = None
    kv_cache_dtype: str = "auto"
    cross: bool = False

    @property
    def name(self) -> str:
        """For the test's id."""
        rules = {"window": self.window_left, "cap": self.logits_soft_cap, "chunk": self.chunk_size}
        rule = "".join(f"_{name}_{value:g}" for name, value in rules.items() if value is not None)
        dtype = "" if self.kv_cache_dtype == "auto" else f"_{self.kv_cache_dtype}"
        cross = "_cross" if self.cross else ""
        return f"{self.mode}{cross}{rule}{dtype}_page_{self.page_size}_{self.page_layout}"

    @property
    def q_len(self) -> int | None:
        """Tokens of every row; None where they are ragged."""
        return {"decode": 1, "draft_decode": 1, "idle": 1, "verify": NUM_DRAFT}.get(self.mode)

    @property
    def num_tokens(self) -> int:
        """Tokens of the bucket."""
        return 48 if self.q_len is None else ROWS * self.q_len

    @property
    def num_new_keys(self) -> int:
        """Keys of the bucket that come with it: a token's own or, in cross attention, those of prefills' encoders."""
        return self.num_prefills * LONGEST_ENCODER if self.cross else self.num_tokens

    @property
    def real_rows(self) -> int:
        """Rows that are no padding; they come first."""
        return 0 if self.mode == "idle" else REAL_ROWS

    @property
    def num_prefills(self) -> int:
        """Real rows that are prefills; they come first."""
        return {"extend": REAL_ROWS, "draft_extend": REAL_ROWS, "mixed": MIXED_PREFILLS}.get(self.mode, 0)

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
            causal=not self.cross,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of ROWS rows, real ones first; tokens row by row.

    Attributes:
        q_lens, kv_lens: Of each row, this pass's tokens included; 0 is padding.
        encoder_lens: Tokens of each row's encoder; 0 without one.
        requests: The row of `page_table` that each row has.
        page_table: Scattered pages of every request, none of them 0: its encoder's, then its own.
        q: Of the real tokens.
        k, v: The keys and values that come with the batch; see `Case.num_new_keys`.
        k_old, v_old: Those that are in the pool, as it stores them; see `old`.
    """

    case: Case
    q_lens: np.ndarray
    kv_lens: np.ndarray
    encoder_lens: np.ndarray
    requests: np.ndarray
    page_table: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_old: np.ndarray
    v_old: np.ndarray

    @property
    def prefix_lens(self) -> np.ndarray:
        """Keys of each row from before this pass."""
        return self.kv_lens - self.q_lens

    @property
    def starts(self) -> np.ndarray:
        """Where each row's tokens begin; where all rows have as many, padded ones do too."""
        lens = self.q_lens if self.case.q_len is None else np.full(ROWS, self.case.q_len)
        return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)

    @functools.cached_property
    def req_to_token(self) -> np.ndarray:
        """Token slots by request and position."""
        size = self.case.page_size
        return (self.page_table[:, :, None] * size + np.arange(size)).reshape(NUM_REQUESTS, -1)[:, :CONTEXT]

    @property
    def own_columns(self) -> np.ndarray:
        """The column of `page_table` where each row's own pages begin: after its encoder's."""
        return -(-self.encoder_lens // self.case.page_size)

    @functools.cached_property
    def seen_lens(self) -> np.ndarray:
        """Keys that each row's layer may see: its own or, in cross attention, its encoder's."""
        return self.encoder_lens if self.case.cross else self.kv_lens

    @functools.cached_property
    def new_lens(self) -> np.ndarray:
        """Those among them, the last ones, that come with the batch."""
        is_prefill = np.arange(ROWS) < self.case.num_prefills
        return np.where(is_prefill, self.encoder_lens, 0) if self.case.cross else self.q_lens

    def seen(self, row: int) -> np.ndarray:
        """Slots of the keys that a row's layer may see."""
        if self.case.cross:
            return self.req_to_token[self.requests[row], : self.encoder_lens[row]]
        return self._own(row)[: self.kv_lens[row]]

    def _own(self, row: int) -> np.ndarray:
        """Slots of a row's own positions."""
        return self.req_to_token[self.requests[row], self.own_columns[row] * self.case.page_size :]

    @functools.cached_property
    def token_slots(self) -> np.ndarray:
        """Where each real token's own key goes."""
        spans = enumerate(zip(self.prefix_lens, self.kv_lens, strict=True))
        return np.concatenate([self._own(row)[first:end] for row, (first, end) in spans]).astype(np.int32)

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """Where each of the keys goes that come with the batch."""
        rows = zip(range(ROWS), self.seen_lens - self.new_lens, strict=True)
        return np.concatenate([self.seen(row)[first:] for row, first in rows]).astype(np.int32)

    @functools.cached_property
    def old(self) -> np.ndarray:
        """Slots of the keys seen that are in the pool already."""
        rows = zip(range(ROWS), self.seen_lens - self.new_lens, strict=True)
        return np.concatenate([self.seen(row)[:end] for row, end in rows])

    def before(self) -> tuple[np.ndarray, np.ndarray]:
        """By slot what the pool stores, NaN wherever no key is."""
        shape, dtype = (self.case.num_pages * self.case.page_size, K, H), self.case.stored_dtype
        k, v = (np.full(shape, np.nan, np.float32).astype(dtype) for _ in range(2))
        k[self.old], v[self.old] = self.k_old, self.v_old
        return k, v

    def after(self) -> tuple[np.ndarray, np.ndarray]:
        """The same once the step has run."""
        rows = self.before()
        for stored, new, scale in zip(rows, (self.k, self.v), self.case.scales, strict=True):
            stored[self.slots] = (new / _factor(scale)).astype(self.case.stored_dtype)
        return rows

    @functools.cached_property
    def out(self) -> np.ndarray:
        """What the oracle says of the real tokens."""
        out, ends, rows = np.zeros(self.q.shape), np.cumsum(self.q_lens), self.after()
        for row in range(self.case.real_rows):
            at, keys = slice(ends[row] - self.q_lens[row], ends[row]), self.seen(row)
            k, v = (
                stored[keys].astype(np.float64) * _factor(scale)
                for stored, scale in zip(rows, self.case.scales, strict=True)
            )
            bounds = np.array([0, self.q_lens[row]]), np.array([0, len(keys)])
            out[at] = np.asarray(reference.ragged_extend(self.q[at], k, v, *bounds, spec=self.case.spec))
        return out

    def pages(self, rows: np.ndarray) -> np.ndarray:
        """Rows by slot as pages in the case's layout."""
        pages = rows.reshape(-1, self.case.page_size, *rows.shape[1:])
        return pages.swapaxes(1, 2) if self.case.page_layout == "HND" else pages


def _factor(scale: Any) -> Any:
    """A scale as a factor of rows."""
    return np.float32(1) if scale is None else np.asarray(scale).reshape(-1, 1)


def padded(values: np.ndarray, size: int, fill: Any = np.nan) -> np.ndarray:
    """Values of real tokens or keys as those of a bucket."""
    whole = np.full((size, *values.shape[1:]), fill, values.dtype)
    whole[: len(values)] = values
    return whole


def make_batch(case: Case, seed: int) -> Batch:
    """A random batch of a case; all batches of a case have the same shapes."""
    rng = np.random.default_rng(seed)
    real, longest = case.real_rows, LONGEST_ENCODER if case.cross else 0
    q_lens = rng.integers(1, 13, real) if case.q_len is None else np.full(real, case.q_len)
    prefixes = rng.integers(1 + DRAFT_STEP, CONTEXT - 16 - 2 * longest, real)
    if case.mode == "mixed":
        q_lens[:MIXED_PREFILLS] = rng.integers(1, 21, MIXED_PREFILLS)
        q_lens[MIXED_PREFILLS:] = 1
    if case.num_prefills:
        prefixes[rng.integers(case.num_prefills)] = 0
    encoder_lens = rng.integers(1, 1 + longest, real) if case.cross else np.zeros(real, int)
    q_lens, prefixes, encoder_lens = (padded(x.astype(np.int32), ROWS, 0) for x in (q_lens, prefixes, encoder_lens))
    order = 1 + rng.permutation(case.num_pages - 1)[: NUM_REQUESTS * case.max_pages]
    nothing = np.zeros((0, K, H), np.float32)
    batch = Batch(
        case=case,
        q_lens=q_lens,
        kv_lens=np.minimum(q_lens + prefixes, CONTEXT),
        encoder_lens=encoder_lens,
        requests=rng.permutation(NUM_REQUESTS)[:ROWS].astype(np.int32),
        page_table=order.reshape(NUM_REQUESTS, -1).astype(np.int32),
        q=rng.normal(size=(q_lens.sum(), N, H)).astype(np.float32),
        k=nothing,
        v=nothing,
        k_old=nothing,
        v_old=nothing,
    )

    def random(slots: np.ndarray, dtype: Any) -> np.ndarray:
        return rng.normal(size=(len(slots), K, H)).astype(dtype)

    new = {name: random(batch.slots, np.float32) for name in ("k", "v")}
    old = {name: random(batch.old, case.stored_dtype) for name in ("k_old", "v_old")}
    return dataclasses.replace(batch, **new, **old)
