"""Random requests whose token slots are known, as SGLang's engine keeps them, and what the oracle says of them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

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


def empty_pool(requests: Requests, dtype: Any, width: int, v_width: int | None, heads: int = 2) -> KVPool:
    """Two layers of pages full of NaN; latent ones if `v_width` is None."""

    def pages(*shape):
        return jnp.full((2, requests.num_pages, requests.page_size, *shape), jnp.nan, dtype)

    k, v = (pages(width), None) if v_width is None else (pages(heads, width), pages(heads, v_width))
    return KVPool((KVGroup(k=k, v=v, name="all", page_layout="NHD"),))


def oracle(q, k, v, spec: AttentionSpec, **options: Any) -> np.ndarray:
    """Attention of one request's rows over its keys."""
    bounds = (np.array([0, len(q)]), np.array([0, len(k)]))
    return np.asarray(reference.ragged_extend(q, k, v, *bounds, spec=spec, **options))
