"""Attention by Triton's kernel: the operands as it reads them, the work list, and the merge of what was split."""

import dataclasses
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
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.triton.attention.config import (
    AttendConfig,
    Parts,
    Strides,
    latent_strides,
    page_strides,
    ragged_strides,
)
from jattn_kernels.triton.attention.kernel import attend
from jattn_kernels.triton.attention.merge_splits import MergeConfig, merge_splits
from jattn_kernels.triton.attention.tile_sizes import (
    AttendTiles,
    choose_tiles,
    row_numbers,
    shares_keys,
    uses_warpgroups,
)
from jattn_kernels.triton.attention.work import Work, decode_work, extend_work
from jattn_kernels.triton.launch import launch

_MOST_SLOTS = 2**20  # 4 MB of page table
_NATIVE_FP8: tuple[int, ...] = (8, 9)  # compute capability from which e4m3 is converted by an instruction

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
    spec, options = call.spec, operands.options
    sizes = choose_tiles(call)
    num_seqs, num_tokens = call.num_seqs, call.num_tokens
    assert num_seqs is not None
    assert num_tokens is not None
    seq_lens, cu_q_lens, table = operands.seq_lens, operands.cu_q_lens, operands.page_table
    if seq_lens is None:
        seq_lens = jnp.diff(operands.cu_kv_lens)
    work = options.schedule
    of_schedule = choose_tiles(call.for_schedule())
    if work is None or sizes != of_schedule or depends_on_places(spec, options) or options.custom_mask is not None:
        max_keys = None if table is None or call.page_size is None else table.shape[1] * call.page_size
        work = _work(call, options, sizes, seq_lens, cu_q_lens, max_keys)
    q0, q1 = _queries(call, operands, work)
    config = _config(call, operands, sizes, q0, q1)
    if table is not None and not call.operation.endswith("decode") and not config.has_whole_pages:
        config, table = by_slot(config, table)
    mask_row = None
    if options.custom_mask is not None:
        if cu_q_lens is None:
            cu_q_lens = jnp.arange(num_seqs + 1, dtype=jnp.int32) * num_tokens
        mask_row = mask_rows(seq_lens, cu_q_lens, math.prod(q0.shape[:-2]))
    out, lse, *parts = launch(
        attend,
        q0,
        q1,
        _as_bytes(operands.k),
        _as_bytes(operands.k if operands.v is None else operands.v),
        operands.cu_kv_lens if table is None else table,
        jnp.asarray(0 if options.layer_index is None else options.layer_index, jnp.int32).reshape(1),
        work.tiles,
        work.split,
        work.bounds.first,
        work.bounds.end,
        work.bounds.position if config.has_slopes else None,
        None if options.custom_mask is None else options.custom_mask.astype(jnp.int8),
        mask_row,
        logit_factors(options, spec) * config.shrink if config.has_factor else None,
        head_scales(options.v_scale, spec.num_kv_heads, options.layer_index) if config.has_v_factor else None,
        _float32(options.alibi_slopes),
        _float32(options.sinks),
        _turns(spec),
        config=config,
        grid=work.tiles.shape[0] * sizes.row_blocks * spec.num_kv_heads,
        out_type=_out_types(config, q0.shape[:-2], _out_dtype(operands), work),
        warps=sizes.warps,
    )
    if work.merges is None:
        return out, lse
    merge = MergeConfig.of(config, splits=sizes.workers // num_seqs + 2)
    out, lse = launch(
        merge_splits,
        *parts,
        work.merges,
        _float32(options.sinks),
        config=merge,
        grid=merge.grid(work.merges.shape[0]),
        in_place=(out, lse),
        warps=merge.warps,
    )
    return out, lse


def by_slot(config: AttendConfig, table: Int[Array, "B pages"]) -> tuple[AttendConfig, Int[Array, "B entries"]]:
    """The same keys as pages of one token, where a layer's rows are equally far apart and the table stays small.

    An extend's warps have little time for addresses beside their products: a tenth less of it on an H200.
    """
    size = config.page_size
    if size <= 1 or table.size * size > _MOST_SLOTS or any(x.page != size * x.token for x in (config.k, config.v)):
        return config, table
    within = jnp.arange(size, dtype=table.dtype)
    slots = (table[:, :, None] * size + within[None, None]).reshape(table.shape[0], -1)
    k, v = (dataclasses.replace(x, page=x.token) for x in (config.k, config.v))
    return dataclasses.replace(config, k=k, v=v, page_size=1, table_columns=slots.shape[1]), slots


def _float32(array: jax.Array | None) -> jax.Array | None:
    return None if array is None else array.astype(jnp.float32)


def _turns(spec: AttentionSpec) -> jax.Array | None:
    """A position's angle of each pair of rotated keys."""
    if spec.rope_theta is None:
        return None
    return jnp.asarray(turns_per_position(spec.head_dim, theta=spec.rope_theta, scale=spec.rope_scale))


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
    spec, q, dtype = call.spec, operands.q, _products_dtype(operands)
    q = _as_finite(q, dtype)
    if spec.rope_theta is not None:
        flat = q.reshape(1, -1, *q.shape[-2:])
        q = rotate(flat, work.bounds.position[None], theta=spec.rope_theta, scale=spec.rope_scale).reshape(q.shape)
    return q, q if operands.q_pe is None else _as_finite(operands.q_pe, dtype)


def _products_dtype(operands: AttentionOperands) -> Any:
    """That of the queries; float16 where keys are 8-bit floats, which it holds as exactly as bfloat16, and sooner."""
    q = _out_dtype(operands)
    return jnp.dtype(jnp.float16) if operands.k.dtype.itemsize == 1 and q.itemsize == 2 else q


def _out_dtype(operands: AttentionOperands) -> Any:
    """That of the queries, bfloat16 of 8-bit ones."""
    return jnp.dtype(jnp.bfloat16) if operands.q.dtype.itemsize == 1 else operands.q.dtype


def _as_finite(q: jax.Array, dtype: Any) -> jax.Array:
    """Queries in the products' dtype; in float16 those of bfloat16 that are too large for it become its largest."""
    if dtype == q.dtype:
        return q
    if dtype == jnp.float16 and q.dtype == jnp.bfloat16:
        most = jnp.asarray(jnp.finfo(jnp.float16).max, jnp.float32)
        q = jnp.clip(q.astype(jnp.float32), -most, most)
    return q.astype(dtype)


def _config(
    call: AttentionCall, operands: AttentionOperands, sizes: AttendTiles, q0: jax.Array, q1: jax.Array
) -> AttendConfig:
    spec, options, latent = call.spec, operands.options, call.operation.startswith("mla")
    key, value = row_numbers(spec, latent=latent)
    halves = Parts(value.first // 2, value.first // 2)
    is_fp8, is_whole = operands.k.dtype.itemsize == 1, halves.blocks == (halves.first, halves.second)
    v_pairs = is_fp8 and not latent and value.second == 0 and is_whole
    v_pairs &= not uses_warpgroups(call.device, sizes.block_m)  # those take converted numbers
    if v_pairs:
        value = halves
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
        v_pairs=v_pairs,
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
        native_fp8=tuple(call.device.compute_capability or ()) >= _NATIVE_FP8,
        rotates=spec.rope_theta is not None,
        shrink=shrink,
        whole_tiles=sizes.whole_tiles and options.custom_mask is None,
        split_rows=call.num_tokens * spec.group_size,
        shares_keys=shares_keys(call, sizes),
        asks_early=sizes.asks_early,
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
    k_strides = page_strides(operands.k.shape, spec, stacked=stacked, kv_index=0)
    return k_strides, page_strides(v.shape, spec, stacked=stacked, kv_index=1)


def _as_bytes(array: jax.Array) -> jax.Array:
    """8-bit floats as the bytes that the kernel takes apart."""
    return jax.lax.bitcast_convert_type(array, jnp.uint8) if array.dtype.itemsize == 1 else array


def _out_types(config: AttendConfig, tokens: tuple[int, ...], dtype: Any, work: Work) -> list[jax.ShapeDtypeStruct]:
    by_head, parts = (*tokens, config.num_q_heads), (1, 1, 1)
    if work.merges is not None:
        parts = work.tiles.shape[0], config.num_kv_heads, config.split_rows
    return [
        jax.ShapeDtypeStruct((*by_head, config.value_dim), dtype),
        jax.ShapeDtypeStruct(by_head, jnp.float32),
        jax.ShapeDtypeStruct((*parts, config.value_dim), jnp.float32),
        jax.ShapeDtypeStruct(parts, jnp.float32),
    ]
