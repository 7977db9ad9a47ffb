"""A token's own key and value, where decode makes them: into the last tile of its keys, and into a page."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tile_stores import constant, divided
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS
from jattn_kernels.mosaic.sm90.common.token_heads import DEPTH, turn_key
from jattn_kernels.mosaic.sm90.common.work_tiles import WorkTile
from jattn_kernels.mosaic.sm90.decode.config import DecodeConfig, Operands, SharedMemory
from jattn_kernels.mosaic.sm90.rotate_and_write import stored

_THREADS = 128
_LINE, _CHUNK = 128, 16  # bytes of a tile's row, and of what swizzling moves together
_LAYOUT = plgpu.Layout.WG_STRIDED((DEPTH,), vec_size=1)


class NewToken:
    """The token of a work tile's sequence, if that work tile has the end of its keys and the token has a place.

    Args:
        head: Of keys.
    """

    def __init__(self, config: DecodeConfig, operands: Operands, scratch: SharedMemory, head: Any, now: WorkTile):
        self._config, self._operands, self._scratch, self._head, self._now = config, operands, scratch, head, now
        self._slot = operands.slots[now.sequence]
        slots = operands.k_pages.shape[1] * config.page_size
        has_end = (now.end_key > 0) & (now.end * config.sizes.block_kv >= now.end_key)
        self._is_here = has_end & (self._slot >= 0) & (self._slot < slots)

    def make(self) -> None:
        """Makes both rows; `commit_smem` is left to the caller."""
        config, operands = self._config, self._operands
        turn = pl.when(self._is_here)
        turn(lambda: turn_key(operands.heads, config.spec, self._scratch.new, self._now.sequence, self._head))

    def put(self, target: Any, of_values: int, tile: Any) -> None:
        """Its row into a tile of keys or values that has arrived, if it is the last one; wgmma then sees it."""
        row = self._now.end_key - 1 - tile * self._config.sizes.block_kv

        @pl.when(self._is_here & (row < self._config.sizes.block_kv))
        def put_row():
            _put_row(target, row, self._row(of_values))
            plgpu.commit_smem()

    def write(self) -> None:
        """Both rows into the token's page, of which nobody reads them before the kernel ends."""
        layer, page_size = self._operands.layer[0], self._config.page_size
        page, number = lax.div(self._slot, page_size), lax.rem(self._slot, page_size)
        by_token = self._config.spec.page_layout == "NHD"
        place = (number, self._head) if by_token else (self._head, number)

        @pl.when(self._is_here)
        def write_rows():
            for of_values, pages in enumerate((self._operands.k_pages, self._operands.v_pages)):
                pages[layer, page, *place] = self._row(of_values)

    def _row(self, of_values: int) -> jax.Array:
        """As pages hold it."""
        return stored(
            plgpu.load(self._scratch.new.at[of_values], layout=_LAYOUT, optimized=False), self._config.kv_dtype
        )


def _put_row(target: Any, row: Any, numbers: jax.Array) -> None:
    """target[row] = numbers, as TMA would have it.

    Args:
        target: (rows, 128), of 16 or 8 bits, tiled.
    """
    if tiles.interpret_params() is not None:
        target[row] = numbers
        return
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    itemsize = jnp.dtype(target.dtype).itemsize
    columns, in_chunks = _LINE // itemsize, _CHUNK // itemsize
    tiled = plgpu.RefType((tiling((TILED_ROWS, columns)), swizzling(_LINE)))

    @plgpu.inline_mgpu(arg_types=(tiled, plgpu.Layout.WG_SPLAT, _LAYOUT))
    def store(ctx: Any, target: Any, row: Any, numbers: Any) -> None:
        del ctx
        (register,) = numbers.registers.flat
        thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
        part, column = divided(arith.remui(thread, constant(_THREADS)), columns)
        chunk, in_chunk = divided(column, in_chunks)
        block, in_block = divided(row.registers.item(), TILED_ROWS)
        block = arith.addi(arith.muli(block, constant(DEPTH // columns)), part)
        place = arith.addi(arith.muli(block, constant(TILED_ROWS)), in_block)
        moved = arith.addi(arith.muli(arith.xori(chunk, in_block), constant(in_chunks)), in_chunk)
        place = arith.addi(arith.muli(place, constant(columns)), moved)
        kind = ir.IntegerType.get_signless(8 * itemsize)
        llvm.store(utils.bitcast(register, kind), utils.getelementptr(utils.memref_ptr(target), [place], kind))

    run: Any = store
    run(target, row, numbers)
