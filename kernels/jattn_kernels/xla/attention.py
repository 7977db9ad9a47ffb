"""The attention operations in portable jnp, for CPU and any GPU."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall, AttentionOptions, Implementation
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.xla.core import attend
from jattn_kernels.xla.fetch import Fetcher, LatentFetcher, PageFetcher, RaggedFetcher
from jattn_kernels.xla.rotate_and_write import rotate_and_write
from jattn_kernels.xla.tiles import decode_tiles, extend_tiles
from jattn_kernels.xla.visibility import tile_keys

_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def refuses(call: AttentionCall) -> str | None:
    """Why `xla` cannot serve a call, or None."""
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
    fetch = PageFetcher(page_table, options.layer_index, spec, page_size, k_pages, v_pages)
    return _decode(q, seq_lens, fetch, options, spec)


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
    fetch = PageFetcher(page_table, options.layer_index, spec, page_size, k_pages, v_pages)
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


@functools.partial(jax.jit, static_argnames=("spec", "page_size"))
def mla_decode(
    q_nope: Float[Array, "B Q N C"],
    q_pe: Float[Array, "B Q N R"],
    latent_pages: Float[Array, "*L P page_size W"],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    options: AttentionOptions,
    *,
    spec: AttentionSpec,
    page_size: int,
) -> tuple[Float[Array, "B Q N C"], Float[Array, "B Q N"]]:
    """Output and lse of a few absorbed queries a sequence."""
    fetch = LatentFetcher(page_table, options.layer_index, spec, page_size, latent_pages)
    return _decode(jnp.concatenate([q_nope, q_pe], axis=-1), seq_lens, fetch, options, spec)


@functools.partial(jax.jit, static_argnames=("spec", "page_size"))
def mla_extend(
    q_nope: Float[Array, "T N C"],
    q_pe: Float[Array, "T N R"],
    latent_pages: Float[Array, "*L P page_size W"],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    options: AttentionOptions,
    *,
    spec: AttentionSpec,
    page_size: int,
) -> tuple[Float[Array, "T N C"], Float[Array, "T N"]]:
    """Output and lse of ragged absorbed queries."""
    fetch = LatentFetcher(page_table, options.layer_index, spec, page_size, latent_pages)
    return _extend(jnp.concatenate([q_nope, q_pe], axis=-1), cu_q_lens, seq_lens, fetch, options, spec)


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


XLA = Implementation(
    name="xla",
    refuses=refuses,
    operations={
        "paged_decode": paged_decode,
        "paged_extend": paged_extend,
        "ragged_extend": ragged_extend,
        "mla_decode": mla_decode,
        "mla_extend": mla_extend,
        "rotate_and_write": rotate_and_write,
    },
)
