"""Paged decode on Hopper: split-KV flash attention, one block a part of a sequence and a kv head.

grid (row blocks, kv heads, parts)         a part: (sequence, first tile, end tile) of the schedule
  memory warpgroup    TMA: q once, then k and v a tile of `block_kv` keys at a time, `stages` tiles ahead
  compute warpgroup   S^T = k q^T, online softmax in base 2 over the keys, acc^T += v^T P^T; then acc / sum and lse out
  k_full, v_full      memory -> compute: the copies of a tile have arrived
  k_free, v_free      compute -> memory: the tile may be overwritten
shared memory: q, then `stages` tiles of k and of v; the float32 result takes their place in the end
"""

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jattn_kernels.mosaic.sm90 import tiles
from jattn_kernels.mosaic.sm90.tiles import SHARED_MEMORY_BYTES, WGMMA_ROWS, PageCopies
from jattn_kernels.spec import AttentionSpec

_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Sizes that the kernel is compiled for.

    Attributes:
        block_rows: Query rows of a block: tokens times group, a multiple of 8.
        block_kv: Keys a tile.
        stages: Tiles in shared memory.
        blocks_per_sm: Blocks that fit on an SM at the same time.
    """

    block_rows: int
    block_kv: int
    stages: int
    blocks_per_sm: int

    def shared_memory_bytes(self, spec: AttentionSpec, itemsize: int) -> int:
        """Bytes of one block."""
        keys = self.stages * self.block_kv * (spec.head_dim + spec.value_dim)
        inputs = itemsize * (self.block_rows * spec.head_dim + keys)
        outputs = 4 * self.block_rows * (spec.value_dim + 1)
        return max(inputs, outputs) + itemsize * self.block_rows * self.block_kv + tiles.RESERVED_BYTES


def choose_tiles(spec: AttentionSpec, itemsize: int, num_tokens: int) -> DecodeTiles:
    """As many stages of 64 keys as let two blocks share an SM, or else one block have it."""
    rows = num_tokens * spec.group_size
    block_rows = min(rows + -rows % tiles.TILED_ROWS, WGMMA_ROWS)
    for blocks_per_sm in (2, 1):
        for stages in (4, 3, 2):
            sizes = DecodeTiles(block_rows, 64, stages, blocks_per_sm)
            if sizes.shared_memory_bytes(spec, itemsize) * blocks_per_sm <= SHARED_MEMORY_BYTES:
                return sizes
    raise AssertionError(f"no tiles fit {spec}")


def decode_parts(
    q: Float[Array, "B rows H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    first_limit: Int[Array, " B"],
    items: Int[Array, "W 3"],
    layer: Int[Array, "1"],
    *,
    spec: AttentionSpec,
    sizes: DecodeTiles,
    page_size: int,
    num_tokens: int,
) -> tuple[Float[Array, "W K R Hv"], Float[Array, "W K R"]]:
    """Attention of every part on its own: normalised float32 output and natural-log lse; 0 and -inf if empty.

    Args:
        q: The rows of one kv head after another, each token by token. A head's rows fill whole blocks of rows, or
            several heads share one block of 8, and each computes all of it.
        k_pages, v_pages: With a leading layer axis.
        first_limit: How many keys the first token sees by the causal rule; each next one sees one more.
        layer: Which layer of the pages.
        num_tokens: Query tokens a sequence, `group_size` rows each.
    """
    num_parts = items.shape[0]
    head_dim, value_dim, dtype, heads = spec.head_dim, spec.value_dim, q.dtype, spec.num_kv_heads
    block_rows, block_kv, stages = sizes.block_rows, sizes.block_kv, sizes.stages
    copies = PageCopies(block_kv, page_size, spec.page_layout)
    row_blocks = max(1, q.shape[1] // (heads * block_rows))  # of a head
    heads_a_block = max(1, heads * block_rows // q.shape[1])

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, table_ref, lens_ref, limit_ref, items_ref, layer_ref, out_ref, lse_ref = refs
        (inputs, (out_smem, lse_smem)), p_smem, (q_full, k_full, v_full), (k_free, v_free) = scratch
        q_smem, k_smem, v_smem = inputs
        part, head, row_block = lax.axis_index("part"), lax.axis_index("head"), lax.axis_index("rows")
        sequence, first, end = items_ref[part, 0], items_ref[part, 1], items_ref[part, 2]
        rows = pl.ds(row_block * block_rows, block_rows)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def memory():
            last_key = lens_ref[sequence] - 1
            layer = layer_ref[0]

            @pl.when(first < end)
            def load_queries():
                block = lax.div(head, heads_a_block) * row_blocks + row_block
                plgpu.copy_gmem_to_smem(q_ref.at[sequence, pl.ds(block * block_rows, block_rows)], q_smem, q_full)

            @pl.loop(0, end - first)
            def load_tile(step):
                stage = lax.rem(step, stages)
                sources = copies.sources(table_ref, sequence, first + step, last_key)
                for pages_ref, smem, full, free in ((k_ref, k_smem, k_full, k_free), (v_ref, v_smem, v_full, v_free)):
                    pl.when(step >= stages)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
                    copies.start(pages_ref, layer, head, sources, smem.at[stage], full.at[stage])

            unread = jnp.minimum(end - first, stages)

            @pl.loop(end - first - unread, end - first)
            def drain(step):
                for free in (k_free, v_free):
                    plgpu.barrier_wait(free.at[lax.rem(step, stages)])

        @pl.when(lax.axis_index("warpgroup") == 0)
        def compute():
            kv_len, limit = lens_ref[sequence], limit_ref[sequence]
            pl.when(first < end)(lambda: plgpu.barrier_wait(q_full))

            def attend_tile(step, carry):
                acc, top, total = carry
                stage = lax.rem(step, stages)
                key = (first + step) * block_kv

                def scores(ref):
                    plgpu.wgmma(ref, k_smem.at[stage], q_smem.transpose((1, 0)))
                    return ref[...]

                plgpu.barrier_wait(k_full.at[stage])
                s = pl.run_scoped(scores, tiles.accumulator(block_kv, block_rows))
                plgpu.barrier_arrive(k_free.at[stage])
                seen = visible(s.shape, row_block, kv_len - key, limit - key)
                s = jnp.where(seen, s * (spec.scale * _LOG2E), -jnp.inf)

                new_top = jnp.maximum(top, s.max(axis=0))
                shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                p = jnp.exp2(s - lax.broadcast_in_dim(shift, s.shape, [1]))
                keep = jnp.exp2(top - shift)
                p_smem.transpose((1, 0))[...] = p.astype(dtype)
                plgpu.commit_smem()
                acc = acc * lax.broadcast_in_dim(keep, acc.shape, [1])
                total = total * keep + p.sum(axis=0)
                plgpu.barrier_wait(v_full.at[stage])
                pl.when(kv_len - key < block_kv)(lambda: tiles.zero_rows_from(v_smem.at[stage], kv_len - key))
                acc = tiles.accumulate(acc, v_smem.at[stage].transpose((1, 0)), p_smem.transpose((1, 0)))
                plgpu.barrier_arrive(v_free.at[stage])
                return acc, new_top, total

            per_row = plgpu.Layout.WGMMA.reduce(0)
            acc, top, total = lax.fori_loop(
                0,
                end - first,
                attend_tile,
                (
                    plgpu.layout_cast(jnp.zeros((value_dim, block_rows), jnp.float32), plgpu.Layout.WGMMA),
                    plgpu.layout_cast(jnp.full((block_rows,), -jnp.inf, jnp.float32), per_row),
                    plgpu.layout_cast(jnp.zeros((block_rows,), jnp.float32), per_row),
                ),
            )
            empty = top == -jnp.inf
            safe_total = jnp.where(empty, 1.0, total)
            out = acc / lax.broadcast_in_dim(safe_total, acc.shape, [1])
            out_smem.transpose((1, 0))[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
            lse_smem[...] = jnp.where(empty, -jnp.inf, (top + jnp.log2(safe_total)) / _LOG2E)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_ref.at[part, head, rows])
            plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[part, head, rows])
            plgpu.wait_smem_to_gmem(0)

    def visible(shape, row_block, keys_left, limit):
        """Which keys of a tile each row sees: those of the sequence, and by the causal rule those up to its own."""
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        if not spec.causal:
            return key < keys_left
        if num_tokens == 1:
            return key < jnp.minimum(keys_left, limit)
        row = row_block * block_rows + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        return (key < keys_left) & (key < limit + row // spec.group_size)

    def entry(*refs):
        inputs = (
            tiles.tile((block_rows, head_dim), dtype),
            tiles.tile((stages, block_kv, head_dim), dtype),
            tiles.tile((stages, block_kv, value_dim), dtype),
        )
        outputs = (plgpu.SMEM((block_rows, value_dim), jnp.float32), plgpu.SMEM((block_rows,), jnp.float32))
        filled = plgpu.Barrier(num_arrivals=copies.copies, num_barriers=stages)
        freed = plgpu.Barrier(num_barriers=stages)
        pl.run_scoped(
            lambda *scratch: kernel(refs, scratch),
            plgpu.RefUnion(inputs, outputs),
            tiles.tile((block_rows, block_kv), dtype),
            (plgpu.Barrier(), filled, filled),
            (freed, freed),
            collective_axes="warpgroup",
        )

    num_rows = row_blocks * block_rows
    run: Any = plgpu.kernel(
        entry,
        out_type=[
            jax.ShapeDtypeStruct((num_parts, heads, num_rows, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, heads, num_rows), jnp.float32),
        ],
        grid=(row_blocks, heads, num_parts),
        grid_names=("rows", "head", "part"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tiles.interpret_params(),
    )
    out, lse = run(q, k_pages, v_pages, page_table, seq_lens, first_limit, items, layer)
    return out, lse
