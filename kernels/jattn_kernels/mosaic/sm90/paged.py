"""The paged operations on Hopper: rows arranged for the kernels, and results put back."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.mosaic.sm90.combine import combine_parts
from jattn_kernels.mosaic.sm90.decode import DecodeKernel, choose_tiles
from jattn_kernels.mosaic.sm90.tiles import NUM_SMS, TILED_ROWS
from jattn_kernels.schedule import DecodeSchedule, split_evenly
from jattn_kernels.spec import AttentionSpec


def decode_schedule(
    seq_lens: Int[Array, " B"], cu_q_lens: None = None, *, spec: AttentionSpec, num_tokens: int, itemsize: int
) -> DecodeSchedule:
    """Parts of sequences for as many workers as, with all heads, fill the GPU once.

    Args:
        num_tokens: Query tokens a sequence.
    """
    sizes = choose_tiles(spec, itemsize, num_tokens)
    row_blocks = -(-num_tokens * spec.group_size // sizes.block_rows)
    workers = max(1, NUM_SMS * sizes.blocks_per_sm // (spec.num_kv_heads * row_blocks))
    return split_evenly(seq_lens, block_kv=sizes.block_kv, workers=workers)


def paged_decode(
    q: Float[Array, "B Q N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    options: AttentionOptions,
    *,
    spec: AttentionSpec,
    page_size: int,
) -> tuple[Float[Array, "B Q N Hv"], Float[Array, "B Q N"]]:
    """Output and lse of a few queries a sequence."""
    batch_size, num_tokens = q.shape[:2]
    q_start, kv_start = options.starts(seq_lens, num_tokens)
    schedule = options.schedule
    if schedule is None:
        schedule = decode_schedule(seq_lens, spec=spec, num_tokens=num_tokens, itemsize=q.dtype.itemsize)
    layer, k_pages, v_pages = stacked(k_pages, v_pages, options.layer_index)
    rows = num_tokens * spec.group_size
    sizes = choose_tiles(spec, q.dtype.itemsize, num_tokens)
    shared = _heads_share_rows(spec, num_tokens)
    if shared:
        by_head = q.reshape(batch_size, spec.num_q_heads, spec.head_dim)
    else:
        by_head = q.reshape(batch_size, num_tokens, spec.num_kv_heads, spec.group_size, spec.head_dim).swapaxes(1, 2)
        by_head = by_head.reshape(batch_size, spec.num_kv_heads, rows, spec.head_dim)
        by_head = jnp.pad(by_head, ((0, 0), (0, 0), (0, -rows % sizes.block_rows), (0, 0)))
        by_head = by_head.reshape(batch_size, -1, spec.head_dim)
    kernel = DecodeKernel(
        spec,
        sizes,
        page_size,
        num_tokens,
        row_blocks=-(-rows // sizes.block_rows),
        heads_a_block=sizes.block_rows // spec.group_size if shared else 1,
        dtype=q.dtype,
    )
    parts = kernel(by_head, k_pages, v_pages, page_table, seq_lens, q_start - kv_start + 1, schedule, layer)
    out, lse = combine_parts(parts, schedule)
    return _by_token(out[:, :, :rows], num_tokens), _by_token(lse[:, :, :rows, None], num_tokens)[..., 0]


def _heads_share_rows(spec: AttentionSpec, num_tokens: int) -> bool:
    """Whether 8 rows of q as it is hold whole heads, so that it need not be padded."""
    return (
        num_tokens == 1
        and spec.group_size in ((2, 4) if spec.value_dim < 128 else (1, 2, 4))
        and spec.num_q_heads % TILED_ROWS == 0
    )


def stacked(
    k_pages: Float[Array, "..."], v_pages: Float[Array, "..."], layer_index: Int[Array, ""] | int | None
) -> tuple[Int[Array, "1"], Float[Array, "..."], Float[Array, "..."]]:
    """The layer as the kernels read it, and pages with a leading layer axis."""
    if layer_index is None:
        return jnp.zeros(1, jnp.int32), k_pages[None], v_pages[None]
    return jnp.asarray(layer_index, jnp.int32).reshape(1), k_pages, v_pages


def _by_token(rows: Float[Array, "B K R W"], num_tokens: int) -> Float[Array, "B Q N W"]:
    batch_size, heads, _, width = rows.shape
    by_token = rows.reshape(batch_size, heads, num_tokens, -1, width).swapaxes(1, 2)
    return by_token.reshape(batch_size, num_tokens, -1, width)
