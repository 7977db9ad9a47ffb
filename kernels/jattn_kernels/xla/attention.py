"""The attention operations in portable jnp, for CPU and any GPU."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall, AttentionOptions, Implementation
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.xla.core import attend
from jattn_kernels.xla.fetch import Fetcher, PageFetcher, RaggedFetcher
from jattn_kernels.xla.tiles import decode_tiles, extend_tiles
from jattn_kernels.xla.visibility import tile_keys

_NOT_SERVED = ("alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale")
_DTYPES = ("float32", "bfloat16", "float16")


def refuses(call: AttentionCall) -> str | None:
    """Why `xla` cannot serve a call, or None."""
    for name in _NOT_SERVED:
        if name in call.features:
            return f"`xla` does not do `{name}`."
    for dtype in (call.q_dtype, call.kv_dtype):
        if dtype not in _DTYPES:
            return f"`xla` does not do {dtype}: it takes {', '.join(_DTYPES)}."
    if call.spec.batch_invariant:
        return "`xla` does not promise `batch_invariant`: XLA's matrix products may differ between batch shapes."
    return None


@functools.partial(jax.jit, static_argnames=("spec", "page_size"))
def paged_decode(
    q: Float[Array, "B Q N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    options: AttentionOptions,
    *,
    spec: AttentionSpec,
    page_size: int,
) -> tuple[Float[Array, "B Q N Hv"], Float[Array, "B Q N"]]:
    """Output and lse of a few queries a sequence."""
    kv_start = _or_zeros(options.kv_start, seq_lens)
    q_lens = jnp.full_like(seq_lens, q.shape[1])
    q_start = kv_start + seq_lens - q_lens if options.q_start is None else options.q_start
    tiles = decode_tiles(q, q_start, options.q_positions)
    keys = tile_keys(tiles, q_lens, seq_lens, kv_start, options.custom_mask)
    fetch = PageFetcher(k_pages, v_pages, page_table, options.layer_index, spec, page_size)
    return attend(tiles, keys, fetch, spec)


@functools.partial(jax.jit, static_argnames=("spec", "page_size"))
def paged_extend(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    options: AttentionOptions,
    *,
    spec: AttentionSpec,
    page_size: int,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Output and lse of ragged queries over paged keys."""
    fetch = PageFetcher(k_pages, v_pages, page_table, options.layer_index, spec, page_size)
    return _extend(q, cu_q_lens, seq_lens, fetch, options, spec)


@functools.partial(jax.jit, static_argnames=("spec",))
def ragged_extend(
    q: Float[Array, "T N H"],
    k: Float[Array, "*L S K H"],
    v: Float[Array, "*L S K Hv"],
    cu_q_lens: Int[Array, " B_plus_1"],
    cu_kv_lens: Int[Array, " B_plus_1"],
    options: AttentionOptions,
    *,
    spec: AttentionSpec,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Output and lse of ragged queries over ragged keys."""
    fetch = RaggedFetcher(k, v, cu_kv_lens, options.layer_index)
    return _extend(q, cu_q_lens, jnp.diff(cu_kv_lens), fetch, options, spec)


def _extend(
    q: Float[Array, "T N H"],
    cu_q_lens: Int[Array, " B_plus_1"],
    kv_lens: Int[Array, " B"],
    fetch: Fetcher,
    options: AttentionOptions,
    spec: AttentionSpec,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    kv_start = _or_zeros(options.kv_start, kv_lens)
    q_lens = jnp.diff(cu_q_lens)
    q_start = kv_start + kv_lens - q_lens if options.q_start is None else options.q_start
    tiles, place = extend_tiles(q, cu_q_lens, q_start, options.q_positions)
    keys = tile_keys(tiles, q_lens, kv_lens, kv_start, options.custom_mask)
    out, lse = attend(tiles, keys, fetch, spec)
    out, lse = out.reshape(-1, *out.shape[2:]), lse.reshape(-1, lse.shape[2])
    return (
        out.at[place].get(mode="fill", fill_value=0),
        lse.at[place].get(mode="fill", fill_value=-jnp.inf),
    )


def _or_zeros(values: Int[Array, " B"] | None, like: Int[Array, " B"]) -> Int[Array, " B"]:
    return jnp.zeros_like(like) if values is None else values


XLA = Implementation(
    name="xla",
    refuses=refuses,
    operations={"paged_decode": paged_decode, "paged_extend": paged_extend, "ragged_extend": ragged_extend},
)
