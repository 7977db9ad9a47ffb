"""Host side of extend on Hopper: the schedule, the kernel's operands, and results put back in their places."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall, AttentionOptions
from jattn_kernels.lowering.scales import head_scales, logit_factors
from jattn_kernels.lowering.token_bounds import token_bounds
from jattn_kernels.merge import sink_share
from jattn_kernels.mosaic.sm90.common.key_rotation import RotationTables
from jattn_kernels.mosaic.sm90.common.operands import stacked
from jattn_kernels.mosaic.sm90.common.row_copies import RowCopies
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS, PageCopies, rows_of_best_copy
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.mosaic.sm90.extend.kernel import ExtendKernel
from jattn_kernels.mosaic.sm90.extend.prepass import has_prepass, prepass, rotated_rows
from jattn_kernels.mosaic.sm90.extend.queries import Queries, prepared
from jattn_kernels.mosaic.sm90.extend.rows import (
    CONSUMER_WARPGROUPS,
    aligned,
    mask_words_by_token,
    of_rows,
)
from jattn_kernels.mosaic.sm90.extend.schedule import (
    ExtendSchedule,
    ExtendTiles,
    choose_extend_tiles,
    extend_schedule,
    is_own,
)
from jattn_kernels.mosaic.sm90.extend.work_tile import Operands
from jattn_kernels.operands import AttentionOperands
from jattn_kernels.spec import AttentionSpec


def make_schedule(
    call: AttentionCall, seq_lens: Int[Array, " B"], cu_q_lens: Int[Array, " B_plus_1"], max_seq_len: int | None
) -> ExtendSchedule:
    """The work list of queries at the ends of their sequences."""
    spec, num_tokens = call.spec, call.num_tokens
    assert num_tokens is not None
    sizes = choose_extend_tiles(spec, ExtendDtypes.widest(jnp.dtype(call.kv_dtype).itemsize, spec))
    return extend_schedule(seq_lens, cu_q_lens, AttentionOptions(), spec=spec, num_tokens=num_tokens, sizes=sizes)


def paged_extend(
    call: AttentionCall, operands: AttentionOperands
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Output and lse of ragged queries over paged keys.

    Raises:
        NotImplementedError: The kernel cannot be compiled for these sizes.
    """
    spec, options, q, page_table = call.spec, operands.options, operands.q, operands.page_table
    page_size, seq_lens, cu_q_lens = call.page_size, operands.seq_lens, operands.cu_q_lens
    assert page_size is not None
    dtypes = multiplied = ExtendDtypes.of(q.dtype, operands.k.dtype, spec)
    (num_seqs, max_pages), num_tokens = page_table.shape, q.shape[0]
    max_keys = max_pages * page_size
    uses_prepass = has_prepass(
        spec, dtypes, page_size=page_size, num_tokens=num_tokens, num_seqs=num_seqs, max_keys=max_keys
    )
    if uses_prepass:
        dtypes = dtypes.with_wide_queries
        multiplied = dtypes.after_prepass
    sizes = choose_extend_tiles(spec, multiplied)
    if (reason := sizes.refuses(spec, multiplied, page_size)) is not None:
        raise NotImplementedError(reason)
    schedule = options.schedule
    # A schedule does not know whether keys of 8 bits will be dequantised ahead, and then be multiplied in larger tiles.
    if schedule is None or is_own(spec, options) or (uses_prepass and schedule.block_kv != sizes.block_kv):
        schedule = extend_schedule(seq_lens, cu_q_lens, options, spec=spec, num_tokens=num_tokens, sizes=sizes)
    num_keys = _whole_tiles(max_keys, sizes)
    mask = None
    if options.custom_mask is not None:
        mask = mask_words_by_token(options.custom_mask, seq_lens, cu_q_lens, num_tokens=num_tokens, num_keys=num_keys)
    position = None
    if dtypes.rotates:
        position = token_bounds(seq_lens, cu_q_lens, options, spec, num_tokens).position
    queries = prepared(q, cu_q_lens, options, position, spec=spec, dtypes=dtypes)
    copies, places = PageCopies.of(spec, sizes.block_kv, page_size, _most_rows(spec, dtypes)), page_table
    keys_and_values = stacked(operands.k, operands.v, options.layer_index)
    if uses_prepass:
        keys_and_values, places, copies = prepass(
            keys_and_values, page_table, seq_lens, spec=spec, dtypes=dtypes, copies=copies
        )
    kernel = ExtendKernel(spec, sizes, copies, multiplied)
    return _extend(kernel, queries, keys_and_values, places, schedule, options, mask, num_keys=num_keys)


def ragged_extend(
    call: AttentionCall, operands: AttentionOperands
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Output and lse of ragged queries over ragged keys.

    Raises:
        NotImplementedError: The kernel cannot be compiled for these sizes.
    """
    spec, options, q = call.spec, operands.options, operands.q
    cu_q_lens, cu_kv_lens = operands.cu_q_lens, operands.cu_kv_lens
    dtypes = multiplied = ExtendDtypes.of(q.dtype, operands.k.dtype, spec)
    if dtypes.rotates:
        multiplied = dtypes.after_prepass
    sizes = choose_extend_tiles(spec, multiplied)
    if (reason := sizes.refuses(spec, multiplied, None)) is not None:
        raise NotImplementedError(reason)
    seq_lens, starts = jnp.diff(cu_kv_lens), cu_kv_lens
    layer, k, v = stacked(operands.k, operands.v, options.layer_index)
    if spec.batch_invariant:
        starts, source = aligned(cu_kv_lens, k.shape[1])
        k, v = (rows.at[layer, source].get(mode="fill", fill_value=0)[None] for rows in (k, v))
        layer = jnp.zeros_like(layer)
    if dtypes.rotates:
        layer, k, v = rotated_rows((layer, k, v), starts, spec=spec, dtypes=dtypes)
    leading_rows = starts[:-1] % TILED_ROWS
    schedule = extend_schedule(
        seq_lens, cu_q_lens, options, spec=spec, num_tokens=q.shape[0], sizes=sizes, leading_rows=leading_rows
    )
    num_rows = k.shape[1]
    num_keys = _whole_tiles(num_rows + TILED_ROWS, sizes)
    mask = None
    if options.custom_mask is not None:
        mask = mask_words_by_token(
            options.custom_mask,
            seq_lens,
            cu_q_lens,
            num_tokens=q.shape[0],
            num_keys=num_keys,
            leading_rows=leading_rows,
        )
    # A copy may pass the end of an array, but may not be larger than it.
    missing = max(sizes.block_kv - num_rows, -num_rows % TILED_ROWS)
    if missing:
        k, v = (jnp.pad(rows, ((0, 0), (0, missing), (0, 0), (0, 0))) for rows in (k, v))
    position = None
    if dtypes.rotates:
        position = token_bounds(seq_lens, cu_q_lens, options, spec, q.shape[0], leading_rows).position
    queries = prepared(q, cu_q_lens, options, position, spec=spec, dtypes=dtypes)
    copies = RowCopies(sizes.block_kv, min(sizes.block_kv, _most_rows(spec, multiplied)))
    kernel = ExtendKernel(spec, sizes, copies, multiplied)
    return _extend(kernel, queries, (layer, k, v), starts, schedule, options, mask, num_keys=num_keys)


def _extend(
    kernel: ExtendKernel,
    queries: Queries,
    keys_and_values: tuple[Int[Array, "1"], Float[Array, "..."], Float[Array, "..."]],
    places: Int[Array, "..."],
    schedule: ExtendSchedule,
    options: AttentionOptions,
    mask: Int[Array, "words T"] | None,
    *,
    num_keys: int,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Output and lse by token.

    Args:
        keys_and_values: As `stacked` gives them.
        places: The page table, or where each sequence's rows begin.
        num_keys: Keys a sequence at most, in whole tiles.
    """
    spec, heads, tile_tokens = kernel.spec, kernel.heads, kernel.tile_tokens
    assert (schedule.block_kv, schedule.block_tokens) == (kernel.sizes.block_kv, CONSUMER_WARPGROUPS * tile_tokens)
    q, num_tokens = queries.columns, queries.columns.shape[0]
    # A copy may pass the end of an array, but may not be larger than it.
    missing = max(0, tile_tokens - num_tokens)
    layer, k, v = keys_and_values
    slopes, rows = options.alibi_slopes, schedule.rows
    scaled = queries.factor is None and (options.q_scale is not None or options.k_scale is not None)
    by_row = functools.partial(
        of_rows, first_token=schedule.query_blocks[:, 1], block_tokens=schedule.block_tokens, heads=heads
    )
    operands = Operands(
        q=jnp.pad(q, ((0, missing), (0, 0), (0, 0))) if missing else q,
        k=k,
        v=v,
        places=places,
        query_blocks=schedule.query_blocks,
        num_query_blocks=schedule.num_query_blocks,
        layer=layer,
        rows=rows if rows is None or slopes is not None else rows._replace(position=None),
        slopes=None if slopes is None else _slopes(slopes, spec, heads),
        logit_factor=logit_factors(options, spec) if scaled else None,
        out_factor=None
        if options.v_scale is None
        else head_scales(options.v_scale, spec.num_kv_heads, options.layer_index),
        mask=None if mask is None else by_row(mask),
        rotations=RotationTables.of(num_keys, spec, kernel.dtypes.kv) if kernel.dtypes.rotates else None,
        row_factor=None if queries.factor is None else by_row(queries.factor),
        order=schedule.order,
    )
    out, lse = kernel(operands)
    lse = lse[..., : heads * tile_tokens].reshape(*lse.shape[:3], heads, tile_tokens)
    lse = lse.transpose(0, 2, 4, 1, 3).reshape(-1, spec.num_q_heads)
    out, lse = out[:num_tokens], lse[schedule.place]
    if (sinks := options.sinks_of_layer) is not None:
        out = (out.astype(jnp.float32) * sink_share(lse, sinks)[..., None]).astype(out.dtype)
    return out, lse


def _most_rows(spec: AttentionSpec, dtypes: ExtendDtypes) -> int:
    """Keys that one copy brings at most."""
    return rows_of_best_copy(max(spec.head_dim, spec.value_dim), dtypes.kv)


def _whole_tiles(num_keys: int, sizes: ExtendTiles) -> int:
    return max(num_keys + -num_keys % sizes.block_kv, sizes.block_kv)


def _slopes(slopes: Float[Array, " N"], spec: AttentionSpec, heads: int) -> Float[Array, "blocks rows"]:
    """ALiBi's slope of each row of a tile, for each block of heads."""
    rows = jnp.repeat(slopes.astype(jnp.float32).reshape(-1, heads), WGMMA_ROWS // heads, axis=1)
    return jnp.pad(rows, ((0, 0), (0, WGMMA_ROWS - rows.shape[1])))
