"""A count in global memory by which all blocks of a grid wait for what others have stored; Pallas' own is cleared by a
kernel before each launch. All blocks must run at a time: a grid of no more than there are SMs, of which no other
process may hold some for good, as two that wait like this could under MPS."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

_SIGN = 0x80000000


def tell(count: Any) -> None:
    """Adds one to the count, once all that the warpgroup has stored is there for who waits, for TMA too.

    Args:
        count: Of any dtype of 32 bits, in global memory: its first number is the count, from 0 on.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(ctx: Any, count: Any) -> None:
        del ctx
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)
        utils.warpgroup_barrier()
        one = arith.constant(ir.IntegerType.get_signless(32), 1)
        is_first = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        utils.inline_ptx(
            "red.release.gpu.global.add.u32 [$0], $1;",
            utils.memref_ptr(count),
            one,
            predicate=is_first,
            has_side_effects=True,
        )

    run: Any = add
    run(count)


def wait_for_all(count: Any, most: int) -> None:
    """Waits until so many have told; the sign of a zero that the count began with is not looked at."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def poll(ctx: Any, count: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        pointer = utils.memref_ptr(count)
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            loop = scf.WhileOp([], [])
            with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
                told = utils.inline_ptx(
                    "ld.relaxed.gpu.global.b32 $0, [$1];", pointer, result_types=i32, has_side_effects=True
                )
                told = arith.andi(told, arith.constant(i32, _SIGN - 1))
                less = arith.cmpi(arith.CmpIPredicate.ult, told, arith.constant(i32, most))
                scf.condition(less, [])
            with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
                scf.yield_([])
        utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        utils.warpgroup_barrier()
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

    run: Any = poll
    run(count)
