"""A token's own queries, key and value, where decode makes them: these into the last tile of keys, and into a page."""

import functools
import operator
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
from jattn_kernels.mosaic.sm90.common.indexed import gather
from jattn_kernels.mosaic.sm90.common.opaque import opaque
from jattn_kernels.mosaic.sm90.common.tile_stores import constant, divided
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS
from jattn_kernels.mosaic.sm90.common.token_heads import DEPTH, TokenHeads, turn_queries
from jattn_kernels.mosaic.sm90.common.work_tiles import WorkTile
from jattn_kernels.mosaic.sm90.decode.config import DecodeConfig, Operands
from jattn_kernels.mosaic.sm90.rotate_and_write import stored

_THREADS = 128
_LINE, _CHUNK = 128, 16  # bytes of a tile's row, and of what swizzling moves together
_LAYOUT = plgpu.Layout.WG_STRIDED((DEPTH,), vec_size=1)


class NewToken:
    """The token of a work tile's sequence, if that work tile has the end of its keys and the token has a place.

    Args:
        head: Of keys.
    """

    def __init__(self, config: DecodeConfig, operands: Operands, head: Any, now: WorkTile):
        self._config, self._operands, self._head, self._now = config, operands, head, now
        slot, slots = self._slot(), operands.k_pages.shape[1] * config.page_size
        has_end = (now.end_key > 0) & (now.end * config.sizes.block_kv >= now.end_key)
        self._is_here = has_end & (slot >= 0) & (slot < slots)
        token, own = self._token()
        rows = _rows(operands.heads, config, token, own)
        self._rows = [stored(row, config.kv_dtype) for row in rows]  # a number of each in a thread

    def _token(self) -> tuple[Any, Any]:
        """Its number and the head's; nothing that follows from them is kept from one work tile to the next.

        With more registers than 128 of a thread one block has an SM by itself. The only sequence is known before the
        schedule is read.
        """
        return opaque(self._now.sequence if self._operands.slots.shape[0] > 1 else 0), opaque(self._head)

    def _slot(self) -> Any:
        """Where the token goes; asked for again, as all that is kept meanwhile takes registers."""
        return self._operands.slots[self._now.sequence]

    def make_queries(self, target: Any) -> None:
        """Into `target`, (8, 128): a tile, unless they are to become sums of fp8 numbers."""
        config, heads, (token, head) = self._config, self._operands.heads, self._token()
        rows: dict[str, Any] = {}
        first = head * config.rows
        if config.rows < tiles.TILED_ROWS:  # as many as warps take at a time, this head's among them: others are any
            first = lax.div(first, tiles.WARPS) * tiles.WARPS
            rows = {"rows": tiles.WARPS, "row": lax.rem(first, tiles.TILED_ROWS)}
        turn_queries(heads, target, token, first, tiled=not config.whole_queries, **rows)
        plgpu.commit_smem()

    def put(self, target: Any, of_values: int, tile: Any) -> None:
        """Its row into a tile of keys or values that has arrived, if it is the last one; wgmma then sees it."""
        row = self._now.end_key - 1 - tile * self._config.sizes.block_kv

        @pl.when(self._is_here & (row < self._config.sizes.block_kv))
        def put_row():
            _put_row(target, row, self._rows[of_values])
            plgpu.commit_smem()

    def write(self) -> None:
        """Both rows into the token's page, of which nobody reads them before the kernel ends."""

        @pl.when(self._is_here)
        def write_rows():
            layer, slot, page_size = self._operands.layer[0], self._slot(), self._config.page_size
            page, number = lax.div(slot, page_size), lax.rem(slot, page_size)
            by_token = self._config.spec.page_layout == "NHD"
            head = opaque(self._head)
            place = (number, head) if by_token else (head, number)
            for of_values, pages in enumerate((self._operands.k_pages, self._operands.v_pages)):
                pages[layer, page, *place] = self._rows[of_values]


def _rows(heads: TokenHeads, config: DecodeConfig, token: Any, head: Any) -> list[jax.Array]:
    """A token's key of a head, turned as `turn_queries` does that, and its value."""
    spec, dtype = config.spec, config.out_dtype
    splits, tokens, num_heads, _, half = heads.qkv.shape
    column = plgpu.broadcasted_iota(jnp.int32, (DEPTH,), 0, layout=_LAYOUT)
    in_half, is_first = lax.rem(column, half), column < half

    def summed(number: Any, column: jax.Array) -> jax.Array:
        first = (token * num_heads + number) * DEPTH + column
        stride = tokens * num_heads * DEPTH
        parts = [gather(heads.qkv, first + i * stride, _LAYOUT).astype(jnp.float32) for i in range(splits)]
        return functools.reduce(operator.add, parts).astype(dtype).astype(jnp.float32)

    key_head = spec.num_q_heads + head
    key, other = (summed(key_head, columns) for columns in (column, jnp.where(is_first, column + half, column - half)))
    cos, sin = (gather(ref, token * half + in_half, _LAYOUT) for ref in (heads.cos, heads.sin))
    turned = key * cos + jnp.where(is_first, -other, other) * sin
    return [turned.astype(dtype), summed(key_head + spec.num_kv_heads, column).astype(dtype)]


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
