"""Shared memory and barriers of a block of the extend kernel."""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.mosaic.sm90.extend.rows import CONSUMER_WARPGROUPS
from jattn_kernels.mosaic.sm90.extend.schedule import ExtendTiles, query_columns, staged_columns, staged_query_columns
from jattn_kernels.mosaic.sm90.extend.work_tile import TilePair, Tiles
from jattn_kernels.spec import AttentionSpec


class SharedMemory(NamedTuple):
    """What a block has; what is of each consumer warpgroup has them as its first axis.

    Attributes:
        q_and_out: Queries as wgmma reads them, and the output, which takes their place.
        q_staging: Where queries arrive.
        p: Probabilities, in the interpreter only.
        copied: Tiles as they arrive.
        converted: Tiles that were converted. What is None is as copied.
        q_full, q_empty: producer -> consumer, and back: a warpgroup's q has arrived; is in the form that wgmma reads.
        last_v_full: As in `Producer`.
        rotate: consumer <-> consumer.
    """

    q_and_out: Any  # [2, 64, columns], [2, rows, width]: they overlap
    q_staging: Any  # [2, 64, width]
    p: Any  # [2, 64, block_kv]
    copied: TilePair
    converted: TilePair
    q_full: Any  # [2]
    q_empty: Any  # [2]
    last_v_full: Any  # [1]
    schedule_barrier: Any  # [1]


def shared_memory(
    spec: AttentionSpec, sizes: ExtendTiles, dtypes: ExtendDtypes, *, copies: int, heads: int
) -> SharedMemory:
    """What `pl.run_scoped` allocates.

    Args:
        copies: Of a tile of keys or values.
        heads: Heads that share a tile's rows.
    """
    width, columns = staged_columns(spec), query_columns(spec, dtypes)
    of_each = (CONSUMER_WARPGROUPS, WGMMA_ROWS)
    at_once = dtypes.columns_at_once(spec.head_dim)
    # A warpgroup's part of the output lies where its own q lies.
    held = WGMMA_ROWS * columns * dtypes.q.itemsize // (width * dtypes.out.itemsize)
    out = plgpu.SMEM((CONSUMER_WARPGROUPS, held, width), dtypes.out)

    def copied(stages, width, columns, is_dequantised):
        return Tiles(
            tiles.tile((stages, sizes.block_kv, width), dtypes.kv, columns),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1 if is_dequantised else CONSUMER_WARPGROUPS, num_barriers=stages),
        )

    def converted(stages, width, columns, is_dequantised):
        if not is_dequantised:
            return Tiles(None, plgpu.Barrier(num_barriers=stages), None)
        return Tiles(
            tiles.tile((sizes.converted_stages, sizes.block_kv, width), dtypes.product, columns),
            plgpu.Barrier(num_barriers=sizes.converted_stages),
            plgpu.Barrier(num_arrivals=CONSUMER_WARPGROUPS, num_barriers=sizes.converted_stages),
        )

    keys = sizes.k_stages, spec.head_dim, at_once, dtypes.dequantises and dtypes.rotates
    values = sizes.v_stages, spec.value_dim, None, dtypes.dequantises
    as_copied = Tiles(None, None, None)
    return SharedMemory(
        q_and_out=tiles.overlaid(tiles.tile((*of_each, columns), dtypes.q, at_once), out),
        q_staging=plgpu.SMEM((*of_each, staged_query_columns(spec, dtypes)), dtypes.q),
        p=tiles.probabilities_tile((*of_each, sizes.block_kv), dtypes.product),
        copied=TilePair(copied(*keys), copied(*values)),
        converted=TilePair(
            converted(*keys) if dtypes.rotates else as_copied, converted(*values) if dtypes.converts else as_copied
        ),
        q_full=plgpu.Barrier(num_arrivals=heads, num_barriers=CONSUMER_WARPGROUPS),
        q_empty=plgpu.Barrier(num_barriers=CONSUMER_WARPGROUPS),
        last_v_full=None if dtypes.converts else plgpu.Barrier(num_arrivals=copies),
        schedule_barrier=plgpu.Barrier(num_arrivals=CONSUMER_WARPGROUPS),
    )
