"""The kernel of paged decode on Hopper: split-KV (Flash-Decoding, Dao et al. 2023) in blocks that have equal work.

grid (row blocks, kv heads, workers)       a worker: work tiles of the schedule, each a split of a sequence's keys
  producer warpgroup    TMA: q of a work tile, then k and v a tile of `block_kv` keys at a time, `stages` tiles ahead
  consumer warpgroups   one, or several that share a work tile's tiles: S^T = k q^T, online softmax in base 2 over the
                        keys, acc^T += v^T P^T; the first one merges their results; then acc / l_i and lse out

Keys stand on wgmma's 64 rows and queries on its few columns: no tensor work is spent on padding. All blocks fit on the
GPU at the same time (persistent), and the producer goes on with the next work tile during the epilogue of the last one:
copies never wait for the start of a block. A sequence of one split is done here; `merge_splits` does the others.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.lowering.split_schedule import DecodeSchedule
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.convert import Converted
from jattn_kernels.mosaic.sm90.common.merge_splits import SplitResults
from jattn_kernels.mosaic.sm90.common.work_tiles import read_work_tiles
from jattn_kernels.mosaic.sm90.decode.config import DecodeConfig, Operands, SharedMemory
from jattn_kernels.mosaic.sm90.decode.consumer import Consumer
from jattn_kernels.mosaic.sm90.decode.converter import convert_all
from jattn_kernels.mosaic.sm90.decode.producer import copy_all

_PRODUCER_REGISTERS = 40  # of a thread
_CONSUMER_REGISTERS = {2: 232, 3: 152}  # where so many consumer warpgroups share an SM


def decode(config: DecodeConfig, operands: Operands, schedule: DecodeSchedule) -> SplitResults:
    """Attention of all work tiles of a schedule."""
    assert schedule.block_kv == config.sizes.block_kv
    heads, num_seqs = config.spec.num_kv_heads, operands.page_table.shape[0]
    shape = (num_seqs, heads, config.row_blocks * config.rows)
    split_shape = (schedule.work_tiles.shape[0], heads, config.row_blocks * config.sizes.block_rows)
    leaves, tree = jax.tree.flatten(operands)
    run = launch.kernel(
        functools.partial(_block, config, tree),
        out_type=[
            jax.ShapeDtypeStruct((*shape, config.width), config.out_dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((*split_shape, config.width), jnp.float32),
            jax.ShapeDtypeStruct(split_shape, jnp.float32),
        ],
        grid=(schedule.workers.shape[0], heads, config.row_blocks),
        grid_names=("worker", "head", "rows"),
        num_threads=config.sizes.warpgroups + 1,
        kernel_name="paged_decode",
    )
    return SplitResults(*run(*leaves))


def _block(config: DecodeConfig, tree, *refs):
    operands, out_refs = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
    pl.run_scoped(
        functools.partial(_warpgroup, config, operands, out_refs), _scratch(config), collective_axes="warpgroup"
    )


def _warpgroup(config: DecodeConfig, operands: Operands, out_refs, scratch: SharedMemory):
    warpgroup, warpgroups = lax.axis_index("warpgroup"), config.sizes.warpgroups
    work_tiles = read_work_tiles(operands)

    def consumer(number):
        @pl.when(warpgroup == number)
        def run():
            if warpgroups > 1:
                plgpu.set_max_registers(_CONSUMER_REGISTERS[warpgroups], action="increase")
            Consumer(config, operands, scratch, number).run(out_refs, work_tiles)

    def consumer_apart(number):
        # Mosaic reduces over keys by way of shared memory behind all that is allocated: so each has some more of it.
        if number + 1 < warpgroups:
            others = plgpu.SMEM((tiles.REDUCTION_BYTES,), jnp.int8)
            pl.run_scoped(lambda _: consumer_apart(number + 1), others, collective_axes="warpgroup")
        consumer(number)

    consumer_apart(0)

    @pl.when(warpgroup == warpgroups)
    def producer():
        if warpgroups > 1:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        bring = convert_all if config.packed else copy_all
        bring(config, operands, scratch, work_tiles)


def _scratch(config: DecodeConfig) -> SharedMemory:
    spec, sizes, dtype, width = config.spec, config.sizes, config.dtype, config.width
    warpgroups, stages, block_rows, block_kv = sizes.warpgroups, sizes.stages, sizes.block_rows, sizes.block_kv
    queries, keys, values = (block_rows, spec.head_dim), (block_kv, spec.head_dim), (block_kv, width)
    pages = (tiles.tile((stages, *keys), config.kv_dtype),)
    if not sizes.latent:
        pages += (tiles.tile((stages, *values), config.kv_dtype, copied_columns=spec.value_dim),)
    filled = (plgpu.Barrier(num_arrivals=1 if config.packed else config.copies.copies, num_barriers=stages),) * len(
        pages
    )
    emptied = (plgpu.Barrier(num_barriers=stages),) * len(pages)
    partials, partials_barrier = None, None
    if warpgroups > 1:
        partials = (
            tiles.tile((warpgroups - 1, width, block_rows), jnp.float32),
            plgpu.SMEM((warpgroups - 1, block_rows), jnp.float32),
        )
        partials_barrier = plgpu.Barrier(num_barriers=warpgroups - 1)
    stacked = (config.q_parts * block_rows, spec.head_dim)
    q_split = None
    if config.whole_queries:
        q_split = (
            tiles.tile((warpgroups, *stacked), config.kv_dtype),
            plgpu.SMEM((warpgroups, block_rows), jnp.float32),
        )
    return SharedMemory(
        q=plgpu.SMEM((2, *queries[::-1]), jnp.float32)
        if config.rotates
        else plgpu.SMEM((2, *queries), config.out_dtype)
        if config.whole_queries
        else tiles.tile((2, *stacked), config.kv_dtype)
        if config.stacks
        else tiles.tile((2, config.q_parts, *queries), config.kv_dtype),
        q_split=q_split,
        pages=pages,
        converted=Converted(
            tiles.tile((warpgroups, *queries), dtype) if config.rotates else None,
            tiles.tile((warpgroups, *keys), dtype) if config.rotates else None,
            tiles.tile((warpgroups, *values), dtype) if config.dequantises else None,
        ),
        p=tiles.tile((warpgroups, block_rows, block_kv), dtype, copied_columns=spec.value_dim),
        partials=partials,
        result=(plgpu.SMEM((block_rows, width), jnp.float32), plgpu.SMEM((block_rows,), jnp.float32)),
        q_full=plgpu.Barrier(num_arrivals=config.q_copies, num_barriers=2),
        q_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=2),
        full=filled,
        empty=emptied,
        partials_full=partials_barrier,
        partials_empty=partials_barrier,
    )
