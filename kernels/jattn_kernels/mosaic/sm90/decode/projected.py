"""Decode of what a projection has left: heads are turned, and keys and values written, by the kernel that attends.

Of one token a sequence. A block makes its own queries while their keys are on their way; the one that has the end of a
sequence's keys makes the token's key and value too, and puts them into the tile in shared memory and into their page.

Heads that are normed as well, as Qwen3's, are left to a kernel of their own: each part of a sequence would make its
queries again, and for 8 sequences of Qwen3-30B-A3B that took 742 us a step where the two kernels take 546.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import AttentionCall
from jattn_kernels.lowering.fp8_parts import num_parts
from jattn_kernels.lowering.key_bounds import is_narrow
from jattn_kernels.lowering.token_bounds import sequence_bounds
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.mosaic.sm90.common.merge_splits import merge_splits
from jattn_kernels.mosaic.sm90.common.operands import stacked
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS
from jattn_kernels.mosaic.sm90.common.token_heads import DEPTH, TokenHeads
from jattn_kernels.mosaic.sm90.decode.config import DecodeConfig, Operands
from jattn_kernels.mosaic.sm90.decode.kernel import decode
from jattn_kernels.mosaic.sm90.decode.split_kv import heads_share_rows, schedule_of
from jattn_kernels.mosaic.sm90.decode.tile_sizes import choose_decode_tiles
from jattn_kernels.operands import AttentionOptions, TokenOperands
from jattn_kernels.spec import AttentionSpec

_DTYPES, _FP8_DTYPES = ("bfloat16", "float16"), ("float8_e4m3fn", "float8_e5m2")
_PAGE_SIZES = (8, 16, 32, 64, 128)
_SERVED = frozenset({"layer_index"})


def refuses(call: AttentionCall) -> str | None:
    """Why decode of a projection's splits cannot be served, or None."""
    spec = call.spec
    kv_dtypes = (call.q_dtype, *_FP8_DTYPES)
    if call.q_dtype not in _DTYPES or call.kv_dtype not in kv_dtypes or call.page_size not in _PAGE_SIZES:
        return (
            f"`mosaic` turns heads as it decodes of {' and '.join(_DTYPES)}, keys in the same dtype or fp8 and pages "
            f"of {', '.join(map(str, _PAGE_SIZES))} tokens, not {call.q_dtype}, {call.kv_dtype} and {call.page_size}."
        )
    if not _has_plain_rows(spec):
        return (
            f"`mosaic` turns heads of {DEPTH} numbers as it decodes, {TILED_ROWS} query heads together, which one key "
            f"head has or several, not {spec.num_q_heads} and {spec.num_kv_heads} of {spec.head_dim}."
        )
    if spec.rope_theta is not None or spec.combined_pool is not None or call.features - _SERVED:
        asked = sorted(call.features - _SERVED) or ["rope_theta" if spec.rope_theta is not None else "combined_pool"]
        return f"`mosaic` does not do `{asked[0]}` where it turns heads as it decodes."
    return None


def _has_plain_rows(spec: AttentionSpec) -> bool:
    """Whether whole heads fill blocks of eight rows of queries, each of 128 numbers."""
    rows_fit = heads_share_rows(spec, 1) or spec.group_size == TILED_ROWS
    return spec.head_dim == spec.value_dim == DEPTH and rows_fit


def projected_decode(
    call: AttentionCall, operands: TokenOperands
) -> tuple[Float[Array, "B N H"], Float[Array, "L ..."], Float[Array, "L ..."]]:
    """Output of one token a sequence, and the pages with the tokens' keys and values."""
    spec, rotary, page_table = call.spec, operands.rotary, operands.page_table
    assert call.page_size is not None
    q_dtype, kv_dtype = jnp.dtype(call.q_dtype), jnp.dtype(call.kv_dtype)
    in_fp8 = kv_dtype != q_dtype
    sizes = dataclasses.replace(choose_decode_tiles(spec, kv_dtype.itemsize, 1), warpgroups=1)
    bounds = sequence_bounds(operands.seq_lens, AttentionOptions(), spec, 1)
    schedule = operands.schedule
    if schedule is None:
        schedule = schedule_of(bounds, spec, sizes, 1, page_table.shape[1] * call.page_size)
    config = DecodeConfig(
        spec,
        sizes,
        call.page_size,
        num_tokens=1,
        row_blocks=1,
        heads_per_block=TILED_ROWS // spec.group_size,
        dtype=jnp.dtype(jnp.float16) if in_fp8 else q_dtype,
        kv_dtype=kv_dtype,
        out_dtype=q_dtype,
        q_parts=num_parts(q_dtype, kv_dtype) if in_fp8 else 1,
        whole_queries=in_fp8,
        projected=True,
    )
    layer, k_pages, v_pages = stacked(rotary.k_pages, rotary.v_pages, rotary.layer_index)
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    kernel_operands = Operands(
        q=None,
        k_pages=k_ref,
        v_pages=v_ref,
        page_table=page_table,
        layer=layer,
        work_tiles=schedule.work_tiles,
        workers=schedule.workers,
        first=bounds.first[:, 0] if is_narrow(spec) else None,
        heads=TokenHeads.of(rotary),
        slots=rotary.slots,
    )
    results = decode(config, kernel_operands, schedule)
    out, _ = merge_splits(results, schedule, batch_invariant=spec.batch_invariant)
    written = launch.frozen(k_ref, v_ref)
    k_pages, v_pages = (
        new.reshape(old.shape) for new, old in zip(written, (rotary.k_pages, rotary.v_pages), strict=True)
    )
    return out.reshape(out.shape[0], spec.num_q_heads, -1), k_pages, v_pages
