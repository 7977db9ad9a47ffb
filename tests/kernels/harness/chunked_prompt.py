"""One prompt, prefilled whole and alone, or beside another request: in two chunks, or behind its unpaged keys."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn_kernels.spec import AttentionSpec

_PAGE_SIZE = 16
_NEIGHBOUR = 5  # tokens of the other request


class ChunkedPrompt(NamedTuple):
    """Arguments of an extend call, those of one with the other request, and the prompt's tokens among the latter's."""

    whole: tuple[Any, ...]
    chunked: tuple[Any, ...]
    tokens: slice


def chunked_prompt(
    spec: AttentionSpec, num_tokens: int, cut: int, dtype: str = "bfloat16", kv_dtype: str = "bfloat16"
) -> ChunkedPrompt:
    """A prompt of which the first chunk has `cut` tokens; both chunks are requests of one call, over the same pages."""
    rng = np.random.default_rng(0)
    num_pages = -(-num_tokens // _PAGE_SIZE)
    pages = (1 + num_pages, _PAGE_SIZE, spec.num_kv_heads)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(of)
        for shape, of in (
            ((num_tokens, spec.num_q_heads, spec.head_dim), dtype),
            ((*pages, spec.head_dim), kv_dtype),
            ((*pages, spec.value_dim), kv_dtype),
        )
    )
    own, other = np.arange(1, 1 + num_pages), np.zeros(num_pages)
    both = jnp.concatenate([q[:_NEIGHBOUR], q])
    lens, offsets = (_NEIGHBOUR, cut, num_tokens), (0, _NEIGHBOUR, _NEIGHBOUR + cut, _NEIGHBOUR + num_tokens)
    return ChunkedPrompt(
        whole=(q, k, v, _ints([own]), _ints([num_tokens]), _ints([0, num_tokens])),
        chunked=(both, k, v, _ints([other, own, own]), _ints(lens), _ints(offsets)),
        tokens=slice(_NEIGHBOUR, None),
    )


def prompt_behind(spec: AttentionSpec, num_tokens: int, kv_dtype: str = "bfloat16") -> ChunkedPrompt:
    """A prompt over its own keys, which are not paged and lie behind the other request's."""
    rng = np.random.default_rng(0)
    total = _NEIGHBOUR + num_tokens
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(of)
        for shape, of in (
            ((total, spec.num_q_heads, spec.head_dim), "bfloat16"),
            ((total, spec.num_kv_heads, spec.head_dim), kv_dtype),
            ((total, spec.num_kv_heads, spec.value_dim), kv_dtype),
        )
    )
    own, alone, both = slice(_NEIGHBOUR, None), _ints([0, num_tokens]), _ints([0, _NEIGHBOUR, total])
    return ChunkedPrompt((q[own], k[own], v[own], alone, alone), (q, k, v, both, both), own)


def _ints(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))
