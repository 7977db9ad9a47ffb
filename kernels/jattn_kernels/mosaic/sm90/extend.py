"""Paged extend on Hopper: the work list, what the kernel reads, and its results put back in their places."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.merge import sink_share
from jattn_kernels.mosaic.sm90.extend_kernel import ExtendKernel
from jattn_kernels.mosaic.sm90.extend_rows import COMPUTE_WARPGROUPS, mask_words, of_rows
from jattn_kernels.mosaic.sm90.extend_schedule import (
    ExtendSchedule,
    choose_tiles,
    extend_schedule,
    heads_per_tile,
    is_own,
)
from jattn_kernels.mosaic.sm90.extend_tile import Operands
from jattn_kernels.mosaic.sm90.paged import stacked
from jattn_kernels.mosaic.sm90.tiles import WGMMA_ROWS
from jattn_kernels.scales import head_scales, logit_factors
from jattn_kernels.spec import AttentionSpec


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
    sizes = choose_tiles(spec)
    return extend_schedule(seq_lens, cu_q_lens, AttentionOptions(), spec=spec, num_tokens=num_tokens, sizes=sizes)


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
    """Output and lse of ragged queries over paged keys.

    Raises:
        NotImplementedError: The kernel cannot be compiled for these sizes.
    """
    sizes = choose_tiles(spec)
    if (reason := sizes.refuses(spec, q.dtype.itemsize, page_size)) is not None:
        raise NotImplementedError(reason)
    num_tokens, heads = q.shape[0], heads_per_tile(spec.group_size)
    schedule = options.schedule
    if schedule is None or is_own(spec, options):
        schedule = extend_schedule(seq_lens, cu_q_lens, options, spec=spec, num_tokens=num_tokens, sizes=sizes)
    assert schedule.block_kv == sizes.block_kv
    tile_tokens = schedule.block_tokens // COMPUTE_WARPGROUPS
    # A copy may pass the end of an array, but may not be larger than it.
    missing = max(0, tile_tokens - num_tokens)
    layer, k_pages, v_pages = stacked(k_pages, v_pages, options.layer_index)
    slopes, rows = options.alibi_slopes, schedule.rows
    scaled = options.q_scale is not None or options.k_scale is not None
    max_keys = page_table.shape[1] * page_size
    operands = Operands(
        q=jnp.pad(q, ((0, missing), (0, 0), (0, 0))) if missing else q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        items=schedule.items,
        num_items=schedule.num_items,
        layer=layer,
        rows=rows if rows is None or slopes is not None else rows._replace(position=None),
        slopes=None if slopes is None else _slopes(slopes, spec, heads),
        logit_factor=logit_factors(options, spec) if scaled else None,
        out_factor=None
        if options.v_scale is None
        else head_scales(options.v_scale, spec.num_kv_heads, options.layer_index),
        mask=None
        if options.custom_mask is None
        else of_rows(
            mask_words(
                options.custom_mask,
                seq_lens,
                cu_q_lens,
                num_tokens=num_tokens,
                num_keys=max(max_keys + -max_keys % sizes.block_kv, sizes.block_kv),
            ),
            schedule.items[:, 1],
            block_tokens=schedule.block_tokens,
            heads=heads,
        ),
    )
    out, lse = ExtendKernel(spec, sizes, page_size, heads, tile_tokens, q.dtype)(operands)
    lse = lse[..., : heads * tile_tokens].reshape(*lse.shape[:3], heads, tile_tokens)
    lse = lse.transpose(0, 2, 4, 1, 3).reshape(-1, spec.num_q_heads)
    out, lse = out[:num_tokens], lse[schedule.place]
    if options.sinks is not None:
        out = (out.astype(jnp.float32) * sink_share(lse, options.sinks)[..., None]).astype(out.dtype)
    return out, lse


def _slopes(slopes: Float[Array, " N"], spec: AttentionSpec, heads: int) -> Float[Array, "blocks rows"]:
    """ALiBi's slope of each row of a tile, for each block of heads."""
    rows = jnp.repeat(slopes.astype(jnp.float32).reshape(-1, heads), WGMMA_ROWS // heads, axis=1)
    return jnp.pad(rows, ((0, 0), (0, WGMMA_ROWS - rows.shape[1])))
