"""Paged extend on Hopper: the work list, the kernel, and its results put back in their places."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.mosaic.sm90.extend_kernel import ExtendKernel
from jattn_kernels.mosaic.sm90.extend_schedule import (
    COMPUTE_WARPGROUPS,
    ExtendSchedule,
    ExtendTiles,
    choose_tiles,
    extend_schedule,
    heads_per_tile,
)
from jattn_kernels.mosaic.sm90.paged import stacked
from jattn_kernels.spec import AttentionSpec


def paged_extend(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    options: AttentionOptions,
    *,
    spec: AttentionSpec,
    page_size: int,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Output and lse of ragged queries over paged keys."""
    layer, k_pages, v_pages = stacked(k_pages, v_pages, options.layer_index)
    sizes = choose_tiles(spec)
    schedule = options.schedule
    if schedule is None:
        q_start, kv_start = options.starts(seq_lens, jnp.diff(cu_q_lens))
        limit = q_start - kv_start + 1
        schedule = extend_schedule(seq_lens, cu_q_lens, limit, spec=spec, num_tokens=q.shape[0], sizes=sizes)
    return extend(q, k_pages, v_pages, page_table, schedule, layer, spec=spec, sizes=sizes, page_size=page_size)


def make_schedule(
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    *,
    spec: AttentionSpec,
    num_tokens: int,
    kv_itemsize: int,
    max_seq_len: int | None = None,
) -> ExtendSchedule:
    """The work list of queries at the ends of their sequences.

    Args:
        num_tokens: Rows of q, padded tokens included.
    """
    limit = seq_lens - jnp.diff(cu_q_lens) + 1
    return extend_schedule(seq_lens, cu_q_lens, limit, spec=spec, num_tokens=num_tokens, sizes=choose_tiles(spec))


def extend(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    page_table: Int[Array, "B max_pages"],
    schedule: ExtendSchedule,
    layer: Int[Array, "1"],
    *,
    spec: AttentionSpec,
    sizes: ExtendTiles,
    page_size: int,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Output and natural-log lse of every token; 0 and -inf where it sees nothing, and for padded tokens.

    Args:
        k_pages, v_pages: With a leading layer axis.
        layer: Which layer of the pages.

    Raises:
        NotImplementedError: The kernel cannot be compiled for `sizes`.
    """
    if (reason := sizes.refuses(spec, q.dtype.itemsize, page_size)) is not None:
        raise NotImplementedError(reason)
    assert schedule.block_kv == sizes.block_kv
    heads = heads_per_tile(spec.group_size)
    block_tokens = schedule.block_tokens
    tile_tokens = block_tokens // COMPUTE_WARPGROUPS
    num_tokens, num_heads, _ = q.shape
    # A copy may pass the end of an array, but may not be larger than it.
    missing = max(0, tile_tokens - num_tokens)
    if missing:
        q = jnp.pad(q, ((0, missing), (0, 0), (0, 0)))
    kernel = ExtendKernel(spec, sizes, page_size, heads, tile_tokens, q.dtype)
    out, lse = kernel(q, k_pages, v_pages, page_table, schedule.items, schedule.num_items, layer)
    lse = lse[..., : heads * tile_tokens].reshape(*lse.shape[:3], heads, tile_tokens)
    lse = lse.transpose(0, 2, 4, 1, 3).reshape(-1, num_heads)
    return out[:num_tokens], lse[schedule.place]
