"""Random requests whose token slots are known, as SGLang's engine keeps them, and what the oracle says of them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.backend import AttentionLayer
from jattn.forward_batch import ForwardBatch, ForwardMode, ReqToTokenPool
from jattn.kv_pool import KVGroup, KVPool
from jattn_kernels import reference
from jattn_kernels.spec import AttentionSpec

NOWHERE = np.iinfo(np.int32).max
MAX_CONTEXT, WIDTH, NUM_REQUESTS, LAYER = 192, 256, 5, 1


@dataclasses.dataclass(frozen=True)
class Requests:
    """Four rows of a batch, the third one padding, and where the tokens of their requests are.

    Attributes:
        seq_lens: Keys of each row; those drafted come on top.
        encoder_lens: Encoder tokens of each row; None without an encoder.
    """

    page_size: int
    seq_lens: np.ndarray
    indices: np.ndarray
    req_to_token: np.ndarray
    num_pages: int
    encoder_lens: np.ndarray | None = None

    def slots(self, row: int, begin: int, end: int) -> np.ndarray:
        """Slots of a row's positions."""
        first = 0 if self.encoder_lens is None else -(-int(self.encoder_lens[row]) // self.page_size) * self.page_size
        return self.req_to_token[self.indices[row], first + begin : first + end]

    def encoder_slots(self, row: int) -> np.ndarray:
        """Slots of a row's encoder tokens."""
        assert self.encoder_lens is not None
        return self.req_to_token[self.indices[row], : self.encoder_lens[row]]

    def batch(self, mode: ForwardMode, slots: list[np.ndarray], num_tokens: int, cu_q_lens: Any, **fields: Any):
        """A batch that writes its tokens to `slots`, padded to `num_tokens`."""
        slots = np.concatenate([*slots, np.full(num_tokens, NOWHERE)])[:num_tokens]
        return ForwardBatch(
            forward_mode=mode,
            input_ids=jnp.zeros(num_tokens, jnp.int32),
            positions=jnp.zeros(num_tokens, jnp.int32),
            seq_lens=jnp.asarray(self.seq_lens),
            cu_q_lens=jnp.asarray(cu_q_lens, jnp.int32),
            out_cache_loc=(jnp.asarray(slots, jnp.int32),),
            req_pool_indices=jnp.asarray(self.indices),
            req_to_token_pool=ReqToTokenPool(jnp.asarray(self.req_to_token)),
            encoder_lens=None if self.encoder_lens is None else jnp.asarray(self.encoder_lens),
            **fields,
        )


def random_requests(seed: int, page_size: int, encoder: bool = False) -> Requests:
    """Requests with scattered pages."""
    rng = np.random.default_rng(seed)
    pages_a_request = WIDTH // page_size
    num_pages = 1 + NUM_REQUESTS * pages_a_request + 2
    pages = 1 + rng.permutation(num_pages - 1)[: NUM_REQUESTS * pages_a_request].reshape(NUM_REQUESTS, -1)
    slots = (pages[:, :, None] * page_size + np.arange(page_size)).reshape(NUM_REQUESTS, -1)
    seq_lens = rng.integers(40, 150, 4).astype(np.int32)
    seq_lens[2] = 0
    encoder_lens = rng.integers(1, 60, 4).astype(np.int32) if encoder else None
    indices = rng.permutation(NUM_REQUESTS)[:4].astype(np.int32)
    return Requests(page_size, seq_lens, indices, slots.astype(np.int32), num_pages, encoder_lens)


@functools.partial(jax.jit, donate_argnums=0)
def _filled(pool, *arguments):
    return pool.set_kv_buffer(*arguments)


def normal(rng, *shape: int) -> jax.Array:
    """Normal float32 numbers."""
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


class Rows:
    """A pool whose rows with keys are known: `k` and `v` by slot, float32 as they were given."""

    def __init__(self, requests: Requests, rng, layer: AttentionLayer, dtype: Any, latent: bool = False):
        heads = () if latent else (layer.tp_k_head_num,)
        before = (2, requests.num_pages, requests.page_size, *heads)
        k = jnp.full((*before, layer.head_dim), jnp.nan, dtype)
        v = None if latent else jnp.full((*before, layer.v_head_dim), jnp.nan, dtype)
        self.pool = KVPool((KVGroup(k=k, v=v, name="all", page_layout="NHD"),))
        self.layer, self.rng, self.dtype, self.latent = layer, rng, dtype, latent
        size = requests.num_pages * requests.page_size
        self.k = np.full((size, layer.tp_k_head_num, layer.head_dim), np.nan, np.float32)
        self.v = np.full((size, layer.tp_k_head_num, layer.v_head_dim), np.nan, np.float32)

    def made(self, slots: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """New keys and values, known from here on to be at `slots`, those in range."""
        k, v = (normal(self.rng, len(slots), *known.shape[1:]) for known in (self.k, self.v))
        v = k[..., : v.shape[-1]] if self.latent else v
        real = slots < len(self.k)
        self.k[slots[real]], self.v[slots[real]] = np.asarray(k)[real], np.asarray(v)[real]
        return k, v

    def fill(self, slots: list[np.ndarray]) -> None:
        """Puts random keys and values into the pool; padded, so that all tests write with one shape."""
        slots = np.concatenate([*slots, np.full(1024, NOWHERE)])[:1024].astype(np.int32)
        k, v = self.made(slots)
        scales = (self.layer.k_scale, self.layer.v_scale)
        self.pool = _filled(self.pool, self.layer, jnp.asarray(slots), k, v, *scales)

    def stored(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values at `slots` as the pool's dtype rounds them."""

        def rounded(x, scale):
            scale = np.float32(1) if scale is None else np.asarray(scale).reshape(1, -1, 1)
            limit = float(jnp.finfo(self.dtype).max)
            return np.clip(x / scale, -limit, limit).astype(self.dtype).astype(np.float64) * scale

        v_scale = self.layer.k_scale if self.latent else self.layer.v_scale  # a latent row has one
        return rounded(self.k[slots], self.layer.k_scale), rounded(self.v[slots], v_scale)


def oracle(q, k, v, spec: AttentionSpec, **options: Any) -> np.ndarray:
    """Attention of one request's rows over its keys."""
    bounds = (np.array([0, len(q)]), np.array([0, len(k)]))
    return np.asarray(reference.ragged_extend(q, k, v, *bounds, spec=spec, **options))
