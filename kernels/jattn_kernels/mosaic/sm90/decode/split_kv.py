"""Host side of split-KV decode: the schedule, the kernel's operands, and results put back in their places."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall, AttentionOptions
from jattn_kernels.lowering.fp8_parts import in_parts, in_range, num_parts
from jattn_kernels.lowering.key_bounds import KeyBounds, depends_on_places, is_narrow, seen_by_some
from jattn_kernels.lowering.mask_words import mask_words_by_key
from jattn_kernels.lowering.rope import rotate, shrink_of
from jattn_kernels.lowering.scales import head_scales, logit_factors
from jattn_kernels.lowering.split_schedule import DecodeSchedule, split
from jattn_kernels.lowering.token_bounds import sequence_bounds
from jattn_kernels.mosaic.sm90.common.convert import rotation_of
from jattn_kernels.mosaic.sm90.common.fp8_queries import split_queries, supports
from jattn_kernels.mosaic.sm90.common.merge_splits import merge_splits
from jattn_kernels.mosaic.sm90.common.operands import stacked
from jattn_kernels.mosaic.sm90.common.split_rows import COLUMNS as ROW_COLUMNS
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, num_sms
from jattn_kernels.mosaic.sm90.decode.config import DecodeConfig, Operands, turns
from jattn_kernels.mosaic.sm90.decode.kernel import decode
from jattn_kernels.mosaic.sm90.decode.rows import by_head, padded
from jattn_kernels.mosaic.sm90.decode.tile_sizes import DecodeTiles, choose_decode_tiles, value_columns
from jattn_kernels.operands import AttentionOperands
from jattn_kernels.packed_latents import is_packed
from jattn_kernels.spec import AttentionSpec

_WIDENED_BYTES = 2  # of a number of packed latents in shared memory


def make_schedule(call: AttentionCall, seq_lens: Int[Array, " B"], max_seq_len: int | None) -> DecodeSchedule | None:
    """The work list of queries at the ends of their sequences; None if it needs a `max_seq_len` that is not given."""
    spec, num_tokens = call.spec, call.num_tokens
    assert num_tokens is not None
    itemsize = _WIDENED_BYTES if is_packed(call.kv_dtype) else jnp.dtype(call.kv_dtype).itemsize
    sizes = choose_decode_tiles(spec, itemsize, num_tokens, latent=call.operation == "mla_decode")
    if sizes.tiles_per_split is not None and max_seq_len is None:
        return None
    bounds = sequence_bounds(seq_lens, AttentionOptions(), spec, num_tokens)
    return schedule_of(bounds, spec, sizes, num_tokens, max_seq_len)


def paged_decode(
    call: AttentionCall, operands: AttentionOperands
) -> tuple[Float[Array, "B Q N Hv"], Float[Array, "B Q N"]]:
    """Output and lse of a few queries a sequence."""
    spec, options, q, page_table = call.spec, operands.options, operands.q, operands.page_table
    q_pe, packed = operands.q_pe, is_packed(operands.k.dtype)
    kv_dtype = q.dtype if packed else operands.k.dtype
    if q_pe is not None and kv_dtype.itemsize == 1:  # both are divided by the same number
        q, q_pe = jnp.concatenate([q, q_pe], axis=-1), None
    seq_lens = operands.seq_lens
    assert call.page_size is not None
    num_tokens, out_dtype = q.shape[1], jnp.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    dtype = jnp.float16 if kv_dtype.itemsize == 1 else q.dtype
    rows = num_tokens * spec.group_size
    sizes = choose_decode_tiles(spec, kv_dtype.itemsize, num_tokens, latent=call.operation == "mla_decode")
    shared = heads_share_rows(spec, num_tokens)
    max_keys = page_table.shape[1] * call.page_size
    bounds = sequence_bounds(seq_lens, options, spec, num_tokens)
    q_rows, logit_factor = _queries(
        q, options, bounds.position, dtype=dtype, kv_dtype=kv_dtype, spec=spec, sizes=sizes, shared=shared
    )
    whole = spec.rope_theta is None and kv_dtype.itemsize == 1 and q_rows.dtype == q.dtype != kv_dtype
    config = DecodeConfig(
        spec,
        sizes,
        call.page_size,
        num_tokens,
        row_blocks=-(-rows // sizes.block_rows),
        heads_per_block=sizes.block_rows // spec.group_size if shared else 1,
        dtype=jnp.dtype(dtype),
        kv_dtype=kv_dtype,
        out_dtype=out_dtype,
        q_parts=1 if spec.rope_theta is not None else num_parts(q.dtype, kv_dtype) if whole else q_rows.shape[1],
        whole_queries=whole,
        packed=packed,
    )
    schedule = options.schedule
    if schedule is None or depends_on_places(spec, options):
        schedule = schedule_of(bounds, spec, sizes, num_tokens, max_keys)

    def of_rows(of_tokens):
        """Of each sequence, or of each row of a head."""
        if num_tokens == 1:
            return of_tokens[:, 0]
        return padded(jnp.repeat(of_tokens, spec.group_size, axis=1), sizes)

    def of_all_rows(of_heads):
        return None if of_heads is None else _of_all_rows(of_heads, spec, sizes, num_tokens, shared)

    tile_rotations = key_rotations = None
    if spec.rope_theta is not None:
        tile = jnp.arange(-(-max_keys // sizes.block_kv), dtype=jnp.int32)
        tile_rotations = rotation_of(tile * sizes.block_kv, spec, jnp.float32)
        key_rotations = rotation_of(jnp.arange(sizes.block_kv, dtype=jnp.int32), spec, jnp.float16, shrink_of(kv_dtype))

    sinks = None if options.sinks is None else jnp.atleast_2d(options.sinks.astype(jnp.float32))
    layer, k_pages, v_pages = stacked(operands.k, operands.v, options.layer_index)
    kernel_operands = Operands(
        q=q_rows,
        q_pe=None if q_pe is None else by_head(q_pe, spec=spec, sizes=sizes, shared=shared),
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        layer=layer,
        work_tiles=schedule.work_tiles,
        workers=schedule.workers,
        first=of_rows(bounds.first) if is_narrow(spec) else None,
        end=of_rows(bounds.end) if num_tokens > 1 else None,
        position=None if options.alibi_slopes is None else of_rows(bounds.position),
        slopes=of_all_rows(options.alibi_slopes),
        sinks=None if sinks is None else jax.vmap(of_all_rows)(sinks),
        logit_factor=logit_factor,
        out_factor=None
        if options.v_scale is None
        else head_scales(options.v_scale, spec.num_kv_heads, options.layer_index),
        mask=None
        if options.custom_mask is None
        else mask_words_by_key(
            options.custom_mask,
            seq_lens,
            num_tokens=num_tokens,
            num_keys=max(max_keys + -max_keys % sizes.block_kv, sizes.block_kv),
        ),
        tile_rotations=tile_rotations,
        key_rotations=key_rotations,
    )
    results = decode(config, kernel_operands, schedule)
    facts: dict[str, Any] = {"batch_invariant": spec.batch_invariant, "sinks": sinks}
    out, lse = merge_splits(results, schedule, layer=layer, **facts)
    out = _by_token(out[:, :, :rows, : spec.value_dim], num_tokens)
    lse = _by_token(lse[:, :, :rows, None], num_tokens)[..., 0]
    return out, lse


def _queries(
    q: Float[Array, "B Q N H"],
    options: AttentionOptions,
    position: Int[Array, "B Q"],
    *,
    dtype: Any,
    kv_dtype: Any,
    spec: AttentionSpec,
    sizes: DecodeTiles,
    shared: bool,
) -> tuple[Float[Array, "..."], Float[Array, "_B K"] | None]:
    """Queries as `Operands` has them, and what their products with keys are multiplied with; None if with nothing.

    Args:
        position: Their own numbers among the keys.
        dtype: Of queries, unless they become sums of fp8 numbers.
    """
    rows_of = functools.partial(by_head, spec=spec, sizes=sizes, shared=shared)
    scaled = options.q_scale is not None or options.k_scale is not None
    if kv_dtype.itemsize == 1 and spec.rope_theta is None:
        rows_stay = q.shape[1] == 1 and (shared or spec.group_size % sizes.block_rows == 0)
        if rows_stay and supports(q.dtype, kv_dtype, spec):
            factor = logit_factors(options, spec) if scaled else None
            if spec.head_dim == ROW_COLUMNS and turns(spec, kv_dtype, sizes):
                return rows_of(q)[:, None], factor
            return split_queries(q[:, 0], kv_dtype, factor, spec)
        parts, size = in_parts(q, kv_dtype, spec)
    else:
        whole, size = in_range(q, dtype, spec)
        parts = (whole,)
    shrink = 1.0 if spec.rope_theta is None else shrink_of(kv_dtype)
    scaled |= parts[0].dtype != q.dtype or shrink != 1.0
    factor = logit_factors(options, spec) * size * shrink if scaled else None
    if spec.rope_theta is None:
        return jnp.stack([rows_of(part) for part in parts], axis=1), factor
    # By their numbers in the table: how far a query is from a key is all that matters.
    q = rotate(parts[0].astype(jnp.float32), position, theta=spec.rope_theta, scale=spec.rope_scale)
    rows = rows_of(q).reshape(q.shape[0], -1, sizes.block_rows, spec.head_dim).swapaxes(2, 3)
    return rows, factor


def schedule_of(
    bounds: KeyBounds, spec: AttentionSpec, sizes: DecodeTiles, num_tokens: int, max_keys: int | None
) -> DecodeSchedule:
    """Parts of sequences for as many workers as, with all heads, fill the GPU once."""
    row_blocks = -(-num_tokens * spec.group_size // sizes.block_rows)
    workers = max(1, num_sms() * sizes.blocks_per_sm // (spec.num_kv_heads * row_blocks))
    first, end = seen_by_some(bounds)
    return split(first, end, sizes.tiles_per_split, max_keys, block_kv=sizes.block_kv, workers=workers)


def heads_share_rows(spec: AttentionSpec, num_tokens: int) -> bool:
    """Whether 8 rows of q as it is hold whole heads, so that it need not be padded."""
    groups = {64: (2, 4), 128: (1, 2, 4), 256: (1, 2, 4)}.get(value_columns(spec), ())
    return num_tokens == 1 and spec.group_size in groups and spec.num_q_heads % TILED_ROWS == 0


def _of_all_rows(
    of_heads: Float[Array, " N"], spec: AttentionSpec, sizes: DecodeTiles, num_tokens: int, shared: bool
) -> Float[Array, " rows"]:
    """A number of a head for each of its rows, as `by_head` has them."""
    of_heads = of_heads.astype(jnp.float32)
    if shared:
        return of_heads
    of_rows = jnp.tile(of_heads.reshape(spec.num_kv_heads, spec.group_size), (1, num_tokens))
    return padded(of_rows, sizes).reshape(-1)


def _by_token(rows: Float[Array, "B K R W"], num_tokens: int) -> Float[Array, "B Q N W"]:
    batch_size, heads, _, width = rows.shape
    by_token = rows.reshape(batch_size, heads, num_tokens, -1, width).swapaxes(1, 2)
    return by_token.reshape(batch_size, num_tokens, -1, width)
