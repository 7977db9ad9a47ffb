"""Sequences run through a model and a paged pool, every row that is not theirs holding NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.backend import BackendOptions, backend_class
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import make_pool
from tests.models.harness.vllm_backends import OVER_VLLM, in_one_array

PADDED_ROWS = 2
PADDED_TOKENS = 3
UNOWNED_PAGES = 4


@functools.partial(jax.jit, static_argnames=("graph", "backend"))
def forward_pass(graph, state, backend, pool, batch):
    model = nnx.merge(graph, state)
    hidden, pool = model(batch, backend.init_forward_metadata(batch), backend, pool)
    return model.compute_logits(hidden), pool


class PagedRun:
    """Each sequence owns pages for `capacity` tokens, in random order, and grows by every call.

    Args:
        surface: A backend's name, or one of OVER_VLLM.
    """

    def __init__(self, model, num_seqs, *, capacity, page_size, dtype=jnp.float32, surface="flash_attention"):
        self.graph, self.state = nnx.split(model)
        options = BackendOptions(
            max_context_len=capacity,
            page_size=page_size,
            max_num_seqs=num_seqs + PADDED_ROWS,
            dtype=jnp.dtype(dtype).name,
        )
        of_surface = OVER_VLLM.get(surface) or backend_class(surface)
        self.backend = of_surface.for_model(model.attention_layers, options)
        self.page_size = page_size
        self.lens = np.zeros(num_seqs, np.int32)
        width = -(-capacity // page_size)
        num_pages = num_seqs * width + UNOWNED_PAGES
        self.page_table = np.zeros((num_seqs + PADDED_ROWS, width), np.int32)
        pages = np.random.default_rng(0).permutation(np.arange(1, num_pages))
        self.page_table[:num_seqs] = pages[: num_seqs * width].reshape(num_seqs, width)
        pool = make_pool(model.kv_groups, num_pages=num_pages, page_size=page_size, dtype=dtype)
        self.num_slots = pool.groups[0].num_slots
        pool = in_one_array(pool) if surface in OVER_VLLM else pool
        self.pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)

    def extend(self, tokens):
        """The logits after each of each sequence's new tokens, from one ragged batch."""
        logits = self._run(ForwardMode.EXTEND, tokens, padding=PADDED_TOKENS)
        return np.split(logits, np.cumsum([len(row) for row in tokens])[:-1])

    def decode(self, tokens):
        """The logits after each sequence's one new token."""
        return self._run(ForwardMode.DECODE, [[token] for token in tokens], padding=PADDED_ROWS)

    def _run(self, mode, tokens, *, padding):
        q_lens = np.array([len(row) for row in tokens] + [0] * PADDED_ROWS, np.int32)
        starts = self.lens
        self.lens = starts + q_lens[: len(tokens)]
        positions = np.concatenate([np.arange(*span) for span in zip(starts, self.lens, strict=True)])
        owner = np.repeat(np.arange(len(q_lens)), q_lens)
        slots = self.page_table[owner, positions // self.page_size] * self.page_size + positions % self.page_size
        cu_q_lens = np.arange(len(q_lens) + 1) if mode.is_decode() else np.cumsum([0, *q_lens])
        batch = ForwardBatch(
            forward_mode=mode,
            input_ids=padded(np.concatenate(tokens), padding, 0),
            positions=padded(positions, padding, 0),
            seq_lens=padded(self.lens, PADDED_ROWS, 0),
            cu_q_lens=jnp.asarray(cu_q_lens, jnp.int32),
            out_cache_loc=(padded(slots, padding, self.num_slots),) * len(self.pool.groups),
            page_tables=(jnp.asarray(self.page_table),) * len(self.pool.groups),
        )
        logits, self.pool = forward_pass(self.graph, self.state, self.backend, self.pool, batch)
        return np.asarray(logits)[: len(positions)]


def padded(values, count, fill):
    return jnp.asarray(np.pad(values, (0, count), constant_values=fill), jnp.int32)
