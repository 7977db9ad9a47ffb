"""Tiles of fp8 values as wgmma takes them from registers: columns on its rows, keys along them, in float16.

Wgmma turns no operand of 8 bits. A matrix load that turns pairs of bytes gives a thread two columns of two keys, which
one permutation and two conversions make a register of either column: no way by shared memory, which would be written
and read twice as wide, nor a meeting of warps. Of every 16 columns the even ones then stand before the odd ones, and so
they do in a product, until `store_product` puts them where they belong.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS

COLUMNS = 128  # of a value: a row of swizzled memory
_CHUNK = 16  # bytes that lie together however memory is swizzled: the columns of a warp
_WARP, _THREADS = 32, 128
_KINDS = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}
_EVEN_THEN_ODD = 0x3120  # of four bytes
_NUMBER = plgpu.Layout.WG_SPLAT


def turned(values: Any) -> jax.Array:
    """The values' columns, [H, keys] of float16, in the order that `store_product` undoes.

    All that the warp's threads have stored there before must be known to all of them.

    Args:
        values: [keys, H], tiled, of fp8: a multiple of 32 keys and of 128 columns.
    """
    keys, width = values.shape
    kind = _KINDS[jnp.dtype(values.dtype).name]

    @plgpu.inline_mgpu(
        arg_types=(_tiled(),),
        return_type=plgpu.ShapeDtypeStruct((width, keys), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def load(ctx: Any, values: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        base = llvm.ptrtoint(i32, utils.memref_ptr(values))
        warp, lane = _warp_and_lane()
        in_tile = arith.remui(lane, _const(TILED_ROWS))
        tile_bytes = TILED_ROWS * COLUMNS
        row = arith.muli(arith.divui(lane, _const(TILED_ROWS)), _const(width // COLUMNS * tile_bytes))
        row = arith.addi(arith.addi(base, row), arith.muli(in_tile, _const(COLUMNS)))
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((width, keys)), dtype=object)
        for block in range(width // WGMMA_ROWS):
            tile, chunk = divmod(block * WARPS, COLUMNS // _CHUNK)
            chunk = arith.xori(arith.addi(warp, _const(chunk)), in_tile)
            column = arith.addi(arith.muli(chunk, _const(_CHUNK)), _const(tile * tile_bytes))
            for begin in range(0, keys, _WARP):
                place = arith.addi(row, _const(begin * width))
                words = utils.inline_ptx(
                    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
                    arith.addi(place, column),
                    result_types=[i32] * 4,
                    has_side_effects=True,
                )
                for number, word in enumerate(words):
                    wide = utils.inline_ptx(
                        "{ .reg .b32 sorted; .reg .b16 even, odd; "
                        f"prmt.b32 sorted, $2, $2, {_EVEN_THEN_ODD}; mov.b32 {{even, odd}}, sorted; "
                        f"cvt.rn.f16x2.{kind} $0, even; cvt.rn.f16x2.{kind} $1, odd; }}",
                        word,
                        result_types=[i32, i32],
                    )
                    at = begin // TILED_ROWS + number
                    for half, register in enumerate(wide):
                        registers[(block, at, 0, 0, half, *[0] * 4)] = utils.bitcast(register, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    run: Any = load
    return run(values)


def zero_rows_from(values: Any, first: jax.Array) -> None:
    """Clears the rows of a tile from one on; all warps know it then, and the copies that come next.

    Args:
        values: As `turned` takes them.
        first: Its number may be negative.
    """
    keys, width = values.shape

    @plgpu.inline_mgpu(arg_types=(_tiled(), _NUMBER))
    def clear(ctx: Any, values: Any, first: Any) -> None:
        del ctx
        base = llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(values))
        first = first.registers.item()
        warp, lane = _warp_and_lane()
        thread = arith.addi(arith.muli(warp, _const(_WARP)), lane)
        chunks = COLUMNS // _CHUNK
        column_tiles = width // COLUMNS
        for begin in range(0, keys * width // _CHUNK, _THREADS):
            # Of all rows of tiles in memory's order, each of one key.
            number = arith.addi(arith.divui(thread, _const(chunks)), _const(begin // chunks))
            row_tile = arith.divui(number, _const(TILED_ROWS * column_tiles))
            key = arith.addi(arith.muli(row_tile, _const(TILED_ROWS)), arith.remui(number, _const(TILED_ROWS)))
            address = arith.addi(base, arith.addi(arith.muli(thread, _const(_CHUNK)), _const(begin * _CHUNK)))
            utils.inline_ptx(
                "st.shared.v4.b32 [$0], {$1, $1, $1, $1};",
                address,
                _const(0),
                predicate=arith.cmpi(arith.CmpIPredicate.sge, key, first),
                has_side_effects=True,
            )

    run: Any = clear
    run(values, first)
    plgpu.commit_smem()


def store_product(product: jax.Array, target: Any) -> None:
    """target = product^T, where the product's rows are columns of `turned` values.

    Args:
        product: float32 [H, rows], rows a multiple of 8.
        target: float32 [rows, H], shared memory without tiles.
    """
    width, rows = product.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(ctx: Any, target: Any, product: Any) -> None:
        del ctx
        base = llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(target))
        warp, lane = _warp_and_lane()
        row = arith.muli(arith.remui(lane, _const(4)), _const(2))
        column = arith.addi(arith.muli(warp, _const(_CHUNK)), arith.muli(arith.divui(lane, _const(4)), _const(2)))
        place = arith.addi(base, arith.muli(arith.addi(arith.muli(row, _const(width)), column), _const(4)))
        registers = product.registers
        for block in range(width // WGMMA_ROWS):
            for eight in range(rows // 8):
                even, odd = (registers[(block, eight, 0, 0, half, *[0] * 4)] for half in range(2))
                for number in range(2):
                    pair = [llvm.extractelement(register, _const(number)) for register in (even, odd)]
                    begin = ((eight * 8 + number) * width + block * WGMMA_ROWS) * 4
                    utils.inline_ptx(
                        "st.shared.v2.f32 [$0], {$1, $2};",
                        arith.addi(place, _const(begin)),
                        *pair,
                        has_side_effects=True,
                    )

    run: Any = store
    run(target, product)


def _tiled() -> Any:
    tiling: Any = plgpu.TilingTransform  # typed as abstract
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.RefType((tiling((TILED_ROWS, COLUMNS)), swizzling(COLUMNS)))


def _warp_and_lane() -> tuple[Any, Any]:
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), _const(_THREADS))
    return arith.divui(thread, _const(_WARP)), arith.remui(thread, _const(_WARP))


def _const(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)
