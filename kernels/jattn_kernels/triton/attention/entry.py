"""Attention by Triton's kernel: the operands as it reads them, the work list, and the merge of what was split."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall, AttentionOptions
from jattn_kernels.lowering.key_bounds import depends_on_places, is_narrow
from jattn_kernels.lowering.rope import rotate, shrink_of, turns_per_position
from jattn_kernels.lowering.scales import head_scales, logit_factors
from jattn_kernels.lowering.token_bounds import mask_rows
from jattn_kernels.operands import AttentionOperands
from jattn_kernels.triton.attention.config import (
    AttendConfig,
    Strides,
    latent_strides,
    page_strides,
    ragged_strides,
)
from jattn_kernels.triton.attention.kernel import attend
from jattn_kernels.triton.attention.merge_splits import MergeConfig, merge_splits
from jattn_kernels.triton.attention.tile_sizes import AttendTiles, choose_tiles, row_numbers
from jattn_kernels.triton.attention.work import Work, decode_work, extend_work
from jattn_kernels.triton.launch import launch

Result = tuple[Float[Array, "..."], Float[Array, "..."]]


def make_schedule(
    call: AttentionCall, seq_lens: Int[Array, " B"], cu_q_lens: Int[Array, " B_plus_1"] | None, max_seq_len: int | None
) -> Work | None:
    """The work list of calls without positions of their own; None if it needs a `max_seq_len` that is not given."""
    sizes = choose_tiles(call)
    if sizes.tiles_per_split is not None and max_seq_len is None:
        return None
    return _work(call, AttentionOptions(), sizes, seq_lens, cu_q_lens, max_seq_len)


def run_attention(call: AttentionCall, operands: AttentionOperands) -> Result:
    """Output and lse of any attention operation."""
    spec, options, decode = call.spec, operands.options, call.operation.endswith("decode")
    sizes = choose_tiles(call)
    seq_lens, cu_q_lens = operands.seq_lens, operands.cu_q_lens
    if seq_lens is None:
        seq_lens = jnp.diff(operands.cu_kv_lens)
    work = options.schedule
    if work is None or depends_on_places(spec, options) or options.custom_mask is not None:
        table = operands.page_table
        max_keys = None if table is None or call.page_size is None else table.shape[1] * call.page_size
        work = _work(call, options, sizes, seq_lens, cu_q_lens, max_keys)
    q0, q1 = _queries(call, operands, work)
    num_tokens = math.prod(q0.shape[:-2])
    config = _config(call, operands, sizes, q0, q1)
    offsets = cu_q_lens
    if offsets is None:
        offsets = jnp.arange(seq_lens.shape[0] + 1, dtype=jnp.int32) * call.num_tokens
    mask = mask_row = None
    if options.custom_mask is not None:
        mask = options.custom_mask.astype(jnp.int8)
        mask_row = mask_rows(seq_lens, offsets, num_tokens)
    has_factor = config.has_factor
    factor = logit_factors(options, spec) * config.shrink if has_factor else None
    half = jnp.asarray(turns_per_position(spec.head_dim, theta=spec.rope_theta, scale=spec.rope_scale)) if (
        spec.rope_theta is not None
    ) else None
    v = operands.k if operands.v is None else operands.v
    outs = launch(
        attend,
        q0,
        q1,
        _as_bytes(operands.k),
        _as_bytes(v),
        operands.cu_kv_lens if operands.page_table is None else operands.page_table,
        jnp.asarray(0 if options.layer_index is None else options.layer_index, jnp.int32).reshape(1),
        work.tiles,
        work.split,
        work.bounds.first,
        work.bounds.end,
        None if options.alibi_slopes is None else work.bounds.position,
        mask,
        mask_row,
        factor,
        head_scales(options.v_scale, spec.num_kv_heads, options.layer_index) if config.has_v_factor else None,
        None if options.alibi_slopes is None else options.alibi_slopes.astype(jnp.float32),
        None if options.sinks is None else options.sinks.astype(jnp.float32),
        half,
        config=config,
        grid=work.tiles.shape[0] * sizes.row_blocks * spec.num_kv_heads,
        out_type=_out_types(config, q0.shape[:-2], q0.dtype, work),
        warps=sizes.warps,
    )
    out, lse, *parts = outs
    if decode and work.merges is not None:
        out, lse = _merged(config, work, out, lse, parts, options)
    return out, lse


def _work(
    call: AttentionCall,
    options: AttentionOptions,
    sizes: AttendTiles,
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"] | None,
    max_keys: int | None,
) -> Work:
    assert call.num_tokens is not None
    facts: dict[str, Any] = {"num_tokens": call.num_tokens}
    if cu_q_lens is None:
        return decode_work(seq_lens, options, call.spec, sizes, max_keys=max_keys, **facts)
    return extend_work(seq_lens, cu_q_lens, options, call.spec, sizes, **facts)


def _queries(
    call: AttentionCall, operands: AttentionOperands, work: Work
) -> tuple[Float[Array, "*tokens N H0"], Float[Array, "*tokens N H1"]]:
    """Queries of the products' dtype, rotated if asked for; of latents in two arrays."""
    spec, q = call.spec, operands.q
    dtype = jnp.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    q = q.astype(dtype)
    if spec.rope_theta is not None:
        flat = q.reshape(1, -1, *q.shape[-2:])
        q = rotate(flat, work.bounds.position[None], theta=spec.rope_theta, scale=spec.rope_scale).reshape(q.shape)
    return q, q if operands.q_pe is None else operands.q_pe.astype(dtype)


def _config(
    call: AttentionCall, operands: AttentionOperands, sizes: AttendTiles, q0: jax.Array, q1: jax.Array
) -> AttendConfig:
    spec, options, latent = call.spec, operands.options, call.operation.startswith("mla")
    key, value = row_numbers(spec, latent=latent)
    k, v = _strides(call, operands)
    scaled = options.q_scale is not None or options.k_scale is not None
    shrink = 1.0 if spec.rope_theta is None else shrink_of(operands.k.dtype)
    assert call.num_tokens is not None
    return AttendConfig(
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        row_blocks=sizes.row_blocks,
        q0_row=q0.shape[-1],
        q1_row=q1.shape[-1],
        q1_first=0 if latent else key.first,
        k=k,
        v=v,
        page_size=call.page_size or 0,
        table_columns=1 if operands.page_table is None else operands.page_table.shape[1],
        keys=key,
        values=value,
        block_m=sizes.block_m,
        block_n=sizes.block_n,
        stages=sizes.stages,
        v_is_k=latent,
        compute_dtype=q0.dtype.name,
        kv_dtype=operands.k.dtype.name,
        scale=spec.scale,
        soft_cap=spec.logits_soft_cap or 0.0,
        has_first=is_narrow(spec),
        has_mask=options.custom_mask is not None,
        has_factor=scaled or shrink != 1.0,
        factor_row=spec.num_kv_heads if options.q_scale is not None and options.q_scale.ndim == 2 else 0,
        has_v_factor=options.v_scale is not None,
        has_slopes=options.alibi_slopes is not None,
        causal=spec.causal,
        has_sinks=options.sinks is not None,
        rotates=spec.rope_theta is not None,
        shrink=shrink,
        whole_tiles=not call.operation.endswith("decode") and options.custom_mask is None,
        split_rows=call.num_tokens * spec.group_size,
    )


def _strides(call: AttentionCall, operands: AttentionOperands) -> tuple[Strides, Strides]:
    spec, stacked = call.spec, operands.options.layer_index is not None
    if call.operation.startswith("mla"):
        latent = latent_strides(operands.k.shape, stacked=stacked)
        return latent, latent
    if call.page_size is None:
        assert operands.v is not None
        return ragged_strides(operands.k.shape, stacked=stacked), ragged_strides(operands.v.shape, stacked=stacked)
    v = operands.k if operands.v is None else operands.v
    return tuple(
        page_strides(pages.shape, spec, stacked=stacked, kv_index=i) for i, pages in enumerate((operands.k, v))
    )  # pyright: ignore[reportReturnType]


def _as_bytes(array: jax.Array) -> jax.Array:
    """8-bit floats as the bytes that the kernel takes apart."""
    return jax.lax.bitcast_convert_type(array, jnp.uint8) if array.dtype.itemsize == 1 else array


def _out_types(config: AttendConfig, tokens: tuple[int, ...], dtype: Any, work: Work) -> list[jax.ShapeDtypeStruct]:
    by_head = (*tokens, config.num_q_heads)
    parts = (0 if work.merges is None else work.tiles.shape[0], config.num_kv_heads, config.split_rows)
    if work.merges is None:
        parts = (1, 1, 1)
    return [
        jax.ShapeDtypeStruct((*by_head, config.value_dim), dtype),
        jax.ShapeDtypeStruct(by_head, jnp.float32),
        jax.ShapeDtypeStruct((*parts, config.value_dim), jnp.float32),
        jax.ShapeDtypeStruct(parts, jnp.float32),
    ]


def _merged(
    config: AttendConfig, work: Work, out: jax.Array, lse: jax.Array, parts: list[jax.Array], options: AttentionOptions
) -> Result:
    assert work.merges is not None
    merge = MergeConfig(
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        value_dim=config.value_dim,
        rows=config.split_rows,
        block=max(16, 1 << (config.value_dim - 1).bit_length()),
        has_sinks=config.has_sinks,
    )
    out, lse = launch(
        merge_splits,
        *parts,
        work.merges,
        None if options.sinks is None else options.sinks.astype(jnp.float32),
        config=merge,
        grid=work.merges.shape[0] * config.num_kv_heads * config.split_rows,
        in_place=(out, lse),
        warps=1,
    )
    return out, lse
