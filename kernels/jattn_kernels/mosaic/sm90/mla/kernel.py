"""The kernel of absorbed latent attention on Hopper where a sequence has many query rows.

grid (row blocks, workers)           a worker: work tiles of the schedule, each a split of a sequence's keys
  producer warpgroup     TMA: q of a work tile, then latent rows, a pair of tiles of 64 keys at a time
  consumer warpgroups    two, a tile of each pair and a half of the output's columns each: 64 rows of 512 numbers are
                         more than one has registers for. S = q k^T and online softmax of its own tile, acc += P v of
                         both tiles; P and the running maximum of the other's tile come through shared memory

While one has its softmax the other has the tensor cores ("seesaw" in FlashMLA, DeepSeek 2025), and while a tile is done
the next one comes into the memory of the one before, which is all that there is room for.
A sequence of one split is done here; `merge_splits` does the others.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.lowering.split_schedule import DecodeSchedule
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.mosaic.sm90.common.merge_splits import SplitResults
from jattn_kernels.mosaic.sm90.common.work_tiles import read_work_tiles
from jattn_kernels.mosaic.sm90.mla.config import BLOCK_ROWS, CONSUMERS, PAIR, LatentConfig, Operands, shared_memory
from jattn_kernels.mosaic.sm90.mla.consumer import Consumer
from jattn_kernels.mosaic.sm90.mla.converter import convert_all
from jattn_kernels.mosaic.sm90.mla.producer import copy_all

# Of a thread of the producer and the consumers: where latents are copied, and where they pass through registers.
_REGISTERS, _REGISTERS_TO_CONVERT = (40, 232), (72, 216)


def attend(config: LatentConfig, operands: Operands, schedule: DecodeSchedule) -> SplitResults:
    """Attention of all work tiles of a schedule."""
    assert schedule.block_kv == PAIR
    rows, width = config.row_blocks * BLOCK_ROWS, config.spec.value_dim
    batch_size, splits = operands.q_nope.shape[0], schedule.num_places
    leaves, tree = jax.tree.flatten(operands)
    run = launch.kernel(
        functools.partial(_block, config, tree),
        out_type=[
            jax.ShapeDtypeStruct((batch_size, 1, rows, width), config.dtype),
            jax.ShapeDtypeStruct((batch_size, 1, rows), jnp.float32),
            jax.ShapeDtypeStruct((splits, 1, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((splits, 1, rows), jnp.float32),
        ],
        grid=(schedule.workers.shape[0], config.row_blocks),
        grid_names=("worker", "rows"),
        num_threads=CONSUMERS + 1,
        reduction_bytes=0,  # rows lie within warps, and all memory is needed
        auto_barriers=False,  # a consumer's few are by name
        kernel_name="mla_decode",
    )
    return SplitResults(*run(*leaves))


def _block(config: LatentConfig, tree, *refs):
    operands, out_refs = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]

    def run(scratch):
        warpgroup, work_tiles = lax.axis_index("warpgroup"), read_work_tiles(operands)
        of_producer, of_consumer = _REGISTERS_TO_CONVERT if config.converts else _REGISTERS
        for number in range(CONSUMERS):

            @pl.when(warpgroup == number)
            def consumer(number=number):
                plgpu.set_max_registers(of_consumer, action="increase")
                Consumer(config, operands, scratch, number).run(out_refs, work_tiles)

        @pl.when(warpgroup == CONSUMERS)
        def producer():
            plgpu.set_max_registers(of_producer, action="decrease")
            bring = convert_all if config.converts else copy_all
            bring(config, operands, scratch, work_tiles)

    pl.run_scoped(run, shared_memory(config), collective_axes="warpgroup")
