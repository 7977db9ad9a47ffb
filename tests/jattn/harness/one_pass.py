"""A model's logits of a whole text by one pass over all of it: what a step by step run must agree with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jattn.flash_attention import FlashAttentionBackend, FlashAttentionConfig
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import make_pool


def logits(model, tokens, *, context, page_size=8):
    """Logits after each of `tokens`, padded to a context that is a multiple of the page size."""
    padded = np.zeros(context, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_forward(model, context, page_size)(padded))[: len(tokens)]


@functools.cache
def _forward(model, context, page_size):
    pages, index = context // page_size, jnp.arange(context, dtype=jnp.int32)
    groups = len(model.kv_groups)
    dtype = model.vocabulary.embedding.dtype
    config = FlashAttentionConfig(max_context_len=context, page_size=page_size, dtype=dtype.name)
    backend = FlashAttentionBackend(config)

    @jax.jit
    def forward(tokens):
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=tokens,
            positions=index,
            seq_lens=jnp.array([context], jnp.int32),
            cu_q_lens=jnp.array([0, context], jnp.int32),
            out_cache_loc=(index + page_size,) * groups,
            page_tables=(jnp.arange(1, pages + 1, dtype=jnp.int32)[None],) * groups,
        )
        pool = make_pool(model.kv_groups, num_pages=pages + 1, page_size=page_size, dtype=dtype)
        hidden, _ = model(batch, backend.init_forward_metadata(batch), backend, pool)
        return model.compute_logits(hidden)

    return forward
