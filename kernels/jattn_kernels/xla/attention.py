"""The attention operations in portable jnp, for CPU and any GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall
from jattn_kernels.operands import AttentionOperands, AttentionOptions
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.xla.core import attend
from jattn_kernels.xla.fetch import Fetcher, LatentFetcher, PageFetcher, RaggedFetcher
from jattn_kernels.xla.tiles import decode_tiles, extend_tiles
from jattn_kernels.xla.visibility import tile_keys

Result = tuple[Float[Array, "..."], Float[Array, "..."]]


@functools.partial(jax.jit, static_argnums=0)
def paged_decode(call: AttentionCall, operands: AttentionOperands) -> Result:
    """Output and lse of a few queries a sequence."""
    return _decode(operands.q, operands.seq_lens, _pages(call, operands), operands.options, call.spec)


@functools.partial(jax.jit, static_argnums=0)
def paged_extend(call: AttentionCall, operands: AttentionOperands) -> Result:
    """Output and lse of ragged queries over paged keys."""
    lens = operands.cu_q_lens, operands.seq_lens
    return _extend(operands.q, *lens, _pages(call, operands), operands.options, call.spec)


@functools.partial(jax.jit, static_argnums=0)
def ragged_extend(call: AttentionCall, operands: AttentionOperands) -> Result:
    """Output and lse of ragged queries over ragged keys."""
    assert operands.v is not None
    fetch = RaggedFetcher(operands.k, operands.v, operands.cu_kv_lens, operands.options.layer_index)
    lens = operands.cu_q_lens, jnp.diff(operands.cu_kv_lens)
    return _extend(operands.q, *lens, fetch, operands.options, call.spec)


@functools.partial(jax.jit, static_argnums=0)
def mla_decode(call: AttentionCall, operands: AttentionOperands) -> Result:
    """Output and lse of a few absorbed queries a sequence."""
    q = jnp.concatenate([operands.q, operands.q_pe], axis=-1)
    return _decode(q, operands.seq_lens, _latents(call, operands), operands.options, call.spec)


@functools.partial(jax.jit, static_argnums=0)
def mla_extend(call: AttentionCall, operands: AttentionOperands) -> Result:
    """Output and lse of ragged absorbed queries."""
    q = jnp.concatenate([operands.q, operands.q_pe], axis=-1)
    lens = operands.cu_q_lens, operands.seq_lens
    return _extend(q, *lens, _latents(call, operands), operands.options, call.spec)


def _pages(call: AttentionCall, operands: AttentionOperands) -> PageFetcher:
    return PageFetcher(*_places(call, operands), operands.k, operands.v)


def _latents(call: AttentionCall, operands: AttentionOperands) -> LatentFetcher:
    return LatentFetcher(*_places(call, operands), operands.k)


def _places(call: AttentionCall, operands: AttentionOperands) -> tuple[Any, Any, Any, Any]:
    return operands.page_table, operands.options.layer_index, call.spec, call.page_size


def _decode(
    q: Float[Array, "B Q N H"],
    kv_lens: Int[Array, " B"],
    fetch: Fetcher,
    options: AttentionOptions,
    spec: AttentionSpec,
) -> tuple[Float[Array, "B Q N Hv"], Float[Array, "B Q N"]]:
    q_start, kv_start = options.starts(kv_lens, q.shape[1])
    tiles = decode_tiles(q, q_start, options.q_positions)
    keys = tile_keys(tiles, jnp.full_like(kv_lens, q.shape[1]), kv_lens, kv_start, options.custom_mask)
    return attend(tiles, keys, fetch, options, spec)


def _extend(
    q: Float[Array, "T N H"],
    cu_q_lens: Int[Array, " B_plus_1"],
    kv_lens: Int[Array, " B"],
    fetch: Fetcher,
    options: AttentionOptions,
    spec: AttentionSpec,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    q_lens = jnp.diff(cu_q_lens)
    q_start, kv_start = options.starts(kv_lens, q_lens)
    tiles, place = extend_tiles(q, cu_q_lens, q_start, options.q_positions)
    keys = tile_keys(tiles, q_lens, kv_lens, kv_start, options.custom_mask)
    out, lse = attend(tiles, keys, fetch, options, spec)
    out, lse = out.reshape(-1, *out.shape[2:]), lse.reshape(-1, lse.shape[2])
    return (
        out.at[place].get(mode="fill", fill_value=0),
        lse.at[place].get(mode="fill", fill_value=-jnp.inf),
    )
