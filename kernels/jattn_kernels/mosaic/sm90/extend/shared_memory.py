"""Shared memory and barriers of a block of the extend kernel."""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendFormats
from jattn_kernels.mosaic.sm90.extend.rows import COMPUTE_WARPGROUPS
from jattn_kernels.mosaic.sm90.extend.schedule import ExtendTiles, query_columns, staged_columns, staged_query_columns
from jattn_kernels.mosaic.sm90.extend.work_tile import TilePair, Tiles
from jattn_kernels.spec import AttentionSpec


class ExtendScratch(NamedTuple):
    """What a block has; what is of each compute warpgroup has them as its first axis.

    Attributes:
        q_and_out: Queries as wgmma reads them, and the output, which takes their place.
        q_staging: Where queries arrive.
        p: Probabilities, in the interpreter only.
        copied: Tiles as they arrive.
        readied: Tiles that were made ready. What is None is as copied.
        q_full, q_free: memory -> compute, and back: a warpgroup's q has arrived; is in the form that wgmma reads.
        last_v_full: As in `ExtendMemory`.
        turn: compute <-> compute.
    """

    q_and_out: Any
    q_staging: Any
    p: Any
    copied: TilePair
    readied: TilePair
    q_full: Any
    q_free: Any
    last_v_full: Any
    turn: Any


def extend_scratch(
    spec: AttentionSpec, sizes: ExtendTiles, formats: ExtendFormats, *, copies: int, heads: int
) -> ExtendScratch:
    """What `pl.run_scoped` allocates.

    Args:
        copies: Of a tile of keys or values.
        heads: Heads that share a tile's rows.
    """
    width, columns = staged_columns(spec), query_columns(spec, formats)
    of_each = (COMPUTE_WARPGROUPS, WGMMA_ROWS)
    at_once = formats.columns_at_once(spec.head_dim)
    # A warpgroup's part of the output lies where its own q lies.
    held = WGMMA_ROWS * columns * formats.q.itemsize // (width * formats.out.itemsize)
    out = plgpu.SMEM((COMPUTE_WARPGROUPS, held, width), formats.out)

    def copied(stages, width, columns, is_widened):
        return Tiles(
            tiles.tile((stages, sizes.block_kv, width), formats.kv, columns),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1 if is_widened else COMPUTE_WARPGROUPS, num_barriers=stages),
        )

    def readied(stages, width, columns, is_widened):
        if not is_widened:
            return Tiles(None, plgpu.Barrier(num_barriers=stages), None)
        return Tiles(
            tiles.tile((sizes.ready_stages, sizes.block_kv, width), formats.product, columns),
            plgpu.Barrier(num_barriers=sizes.ready_stages),
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=sizes.ready_stages),
        )

    keys = sizes.k_stages, spec.head_dim, at_once, formats.widens and formats.turns
    values = sizes.v_stages, spec.value_dim, None, formats.widens
    as_copied = Tiles(None, None, None)
    return ExtendScratch(
        q_and_out=tiles.overlaid(tiles.tile((*of_each, columns), formats.q, at_once), out),
        q_staging=plgpu.SMEM((*of_each, staged_query_columns(spec, formats)), formats.q),
        p=tiles.probabilities_tile((*of_each, sizes.block_kv), formats.product),
        copied=TilePair(copied(*keys), copied(*values)),
        readied=TilePair(
            readied(*keys) if formats.turns else as_copied, readied(*values) if formats.readies else as_copied
        ),
        q_full=plgpu.Barrier(num_arrivals=heads, num_barriers=COMPUTE_WARPGROUPS),
        q_free=plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
        last_v_full=None if formats.readies else plgpu.Barrier(num_arrivals=copies),
        turn=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
    )
