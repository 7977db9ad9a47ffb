"""Tiles of fp8 rows, made wider on their way through a warpgroup's registers into shared memory.

TMA copies numbers as they are, and latents leave no room for a tile of fp8 beside that of its wider numbers. A tile has
64 rows: a warp has 16 of them, which lie in one page, and a thread 16 bytes at a time of every eighth one, so that what
eight threads store fills all banks. The few instructions that Pallas has not are written out here; the interpreter
loads and stores rows.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.packed_latents import SCALE_BYTES

WARP_ROWS = WGMMA_ROWS // WARPS  # which lie in one page
PIECE_COLUMNS = 64  # that two loads of all threads bring: a row of a swizzled tile
_LOADS = WARP_ROWS // TILED_ROWS  # of a piece's columns
_LOAD_BYTES, _SWIZZLE_BYTES = 16, 128
_ROW_THREADS = PIECE_COLUMNS // _LOAD_BYTES  # that load of one row
_THREADS, _WARP = 128, 32
_OF_THREADS = plgpu.Layout.WG_STRIDED((_THREADS,), vec_size=1)
_WORDS = 4  # of a load
_OF_LOADED_ROWS = plgpu.Layout.WG_STRIDED((_LOADS * _THREADS,), vec_size=1)
_NUMBER = plgpu.Layout.WG_SPLAT
# Two words of 16-bit numbers for one of e4m3, which has no direct way to bfloat16.
_WIDEN = {
    "float16": "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;",
    "bfloat16": (
        "cvt.rn.f16x2.e4m3x2 pair, low; mov.b32 {a, b}, pair; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
        "cvt.rn.bf16x2.f32 $0, y, x; "
        "cvt.rn.f16x2.e4m3x2 pair, high; mov.b32 {a, b}, pair; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
        "cvt.rn.bf16x2.f32 $1, y, x;"
    ),
    "bfloat16, scaled": (
        "cvt.rn.f16x2.e4m3x2 pair, low; mov.b32 {a, b}, pair; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
        "mul.f32 x, x, $3; mul.f32 y, y, $3; cvt.rn.bf16x2.f32 $0, y, x; "
        "cvt.rn.f16x2.e4m3x2 pair, high; mov.b32 {a, b}, pair; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
        "mul.f32 x, x, $3; mul.f32 y, y, $3; cvt.rn.bf16x2.f32 $1, y, x;"
    ),
}


def find_rows(page_table: Any, sequence: Any, tile: Any, last_key: Any, *, page_size: int, num_pages: int) -> jax.Array:
    """Where a tile's rows lie in a layer's pool, as `load` wants it.

    Past the sequence's last page it is that page again, and of a sequence without keys any page: what is loaded from
    there has no meaning.

    Args:
        page_size: A multiple of 16.
    """
    if tiles.interpret_params() is not None:
        first = tile * WGMMA_ROWS + jnp.arange(WARPS, dtype=jnp.int32) * WARP_ROWS
        pages = [page_table[sequence, lax.div(jnp.minimum(key, last_key), page_size)] for key in first]
        pages = jnp.clip(jnp.stack(pages), 0, num_pages - 1)
        return pages * page_size + lax.rem(first, page_size)

    max_pages = page_table.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _NUMBER, _NUMBER, _NUMBER),
        return_type=plgpu.ShapeDtypeStruct((_THREADS,), jnp.int32, layout=_OF_THREADS),
    )
    def find(ctx: Any, page_table: Any, sequence: Any, tile: Any, last_key: Any) -> Any:
        del ctx
        sequence, tile, last_key = (_scalar(each) for each in (sequence, tile, last_key))
        warp, lane_row, _ = _place_of_thread()
        key = arith.addi(arith.muli(tile, _const(WGMMA_ROWS)), arith.muli(warp, _const(WARP_ROWS)))
        entry = arith.divui(arith.minsi(key, last_key), _const(page_size))
        entry = arith.addi(arith.muli(sequence, _const(max_pages)), entry)
        i32 = ir.IntegerType.get_signless(32)
        page = llvm.load(i32, utils.getelementptr(utils.memref_ptr(page_table), [entry], i32))
        page = arith.minui(page, _const(num_pages - 1))
        row = arith.addi(arith.muli(page, _const(page_size)), arith.remui(key, _const(page_size)))
        return _registers([arith.addi(row, lane_row)], 1)

    run: Any = find
    return run(page_table, sequence, tile, last_key)


def load(pages: Any, layer: Any, rows: jax.Array, column: int, width: int) -> jax.Array:
    """Some columns of a tile's rows, in registers.

    Args:
        pages: [L, P, page_size, 1, C] of e4m3, or of bytes, of which the columns that are meant hold that.
        rows: As `find_rows` gives them.
        width: A multiple of 64.
    """
    _, num_pages, page_size, _, columns = pages.shape
    if tiles.interpret_params() is not None:
        parts = []
        for warp in range(WARPS):
            page, row = lax.div(rows[warp], page_size), lax.rem(rows[warp], page_size)
            parts.append(pages[layer, page, pl.ds(row, WARP_ROWS), 0, pl.ds(column, width)])
        return jnp.concatenate(parts)
    loads = width // PIECE_COLUMNS * _LOADS

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _NUMBER, _OF_THREADS),
        return_type=plgpu.ShapeDtypeStruct((loads * _WORDS * _THREADS,), jnp.int32, layout=_loaded(loads)),
    )
    def load_registers(ctx: Any, pages: Any, layer: Any, rows: Any) -> Any:
        del ctx
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        row = _row_of_thread(rows, layer, num_pages * page_size)
        _, _, piece = _place_of_thread()
        offset = arith.muli(arith.extui(i64, row), arith.constant(i64, columns))
        offset = arith.addi(offset, arith.extui(i64, arith.muli(piece, _const(_LOAD_BYTES))))
        address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(pages)), offset)
        loaded = []
        for number in range(loads):
            group, part = divmod(number, _LOADS)
            begin = part * TILED_ROWS * columns + column + group * PIECE_COLUMNS
            words = utils.inline_ptx(
                "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
                arith.addi(address, arith.constant(i64, begin)),
                result_types=[i32] * _WORDS,
                has_side_effects=True,
            )
            loaded.append(words)
        return _registers(loaded, _WORDS)

    run: Any = load_registers
    return run(pages, layer, rows)


def load_scales(pages: Any, layer: Any, rows: jax.Array, column: int) -> jax.Array:
    """A float32 of each of a tile's rows, in the registers of the threads that load this row.

    Args:
        pages: [L, P, page_size, 1, bytes].
        rows: As `find_rows` gives them.
        column: The first byte of it.
    """
    _, num_pages, page_size, _, columns = pages.shape
    if tiles.interpret_params() is not None:
        return lax.bitcast_convert_type(load(pages, layer, rows, column, SCALE_BYTES), jnp.float32)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _NUMBER, _OF_THREADS),
        return_type=plgpu.ShapeDtypeStruct((_LOADS * _THREADS,), jnp.float32, layout=_OF_LOADED_ROWS),
    )
    def load_registers(ctx: Any, pages: Any, layer: Any, rows: Any) -> Any:
        del ctx
        i64 = ir.IntegerType.get_signless(64)
        row = _row_of_thread(rows, layer, num_pages * page_size)
        offset = arith.muli(arith.extui(i64, row), arith.constant(i64, columns))
        address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(pages)), offset)
        loaded = [
            utils.inline_ptx(
                "ld.global.nc.f32 $0, [$1];",
                arith.addi(address, arith.constant(i64, part * TILED_ROWS * columns + column)),
                result_types=ir.F32Type.get(),
                has_side_effects=True,
            )
            for part in range(_LOADS)
        ]
        return _registers(loaded, 1, signed=None)

    run: Any = load_registers
    return run(pages, layer, rows)


def store(loaded: jax.Array, target: Any, column: int, width: int, scales: jax.Array | None = None) -> None:
    """Puts what `load` has loaded into columns of a tile; `stored` then makes it known.

    Args:
        target: [64, C], tiled, of float16 or bfloat16; of bfloat16 with scales.
        scales: Of the rows, as `load_scales` gives them; None is 1.
    """
    name = jnp.dtype(target.dtype).name
    if tiles.interpret_params() is not None:
        if scales is not None:
            loaded = lax.bitcast_convert_type(loaded, jnp.float8_e4m3fn).astype(jnp.float32) * scales[:, None]
        target[:, pl.ds(column, width)] = loaded.astype(name)
        return
    loads, row_tiles = width // PIECE_COLUMNS * _LOADS, target.shape[1] // PIECE_COLUMNS
    of_scales = () if scales is None else (_OF_LOADED_ROWS,)

    @plgpu.inline_mgpu(arg_types=(_tiled(), _loaded(loads), *of_scales))
    def store_registers(ctx: Any, target: Any, loaded: Any, *scales: Any) -> None:
        del ctx
        factors = [_element(register) for of_rows in scales for register in of_rows.registers.flat]
        i8 = ir.IntegerType.get_signless(8)
        warp, lane_row, piece = _place_of_thread()
        tile_bytes = TILED_ROWS * _SWIZZLE_BYTES
        place = arith.addi(
            arith.muli(warp, _const(_LOADS * row_tiles * tile_bytes)), arith.muli(lane_row, _const(_SWIZZLE_BYTES))
        )
        pointer = utils.memref_ptr(target)
        chunk = arith.xori(arith.muli(piece, _const(2)), lane_row)
        for number, register in enumerate(loaded.registers.flat):
            group, part = divmod(number, _LOADS)
            begin = (part * row_tiles + column // PIECE_COLUMNS + group) * tile_bytes
            factor = factors[part] if factors else None
            words = [_widened(llvm.extractelement(register, _const(word)), name, factor) for word in range(_WORDS)]
            for half in range(2):
                of_half = [*words[2 * half], *words[2 * half + 1]]
                in_row = arith.muli(arith.xori(chunk, _const(half)), _const(_LOAD_BYTES))
                at = arith.addi(arith.addi(place, _const(begin)), in_row)
                llvm.store(_vector(of_half), utils.getelementptr(pointer, [at], i8), alignment=_LOAD_BYTES)

    run: Any = store_registers
    run(target, loaded, *(() if scales is None else (scales,)))


def store_as_they_are(loaded: jax.Array, target: Any, column: int = 0) -> None:
    """Puts rows of 128 bytes that `load` has loaded into columns of a tile; `stored` then makes it known.

    Args:
        target: [64, C], tiled, of bfloat16, which the bytes are.
    """
    if tiles.interpret_params() is not None:
        numbers = lax.bitcast_convert_type(loaded.reshape(WGMMA_ROWS, PIECE_COLUMNS, -1), target.dtype)
        target[:, pl.ds(column, PIECE_COLUMNS)] = numbers
        return
    row_tiles = target.shape[1] // PIECE_COLUMNS

    @plgpu.inline_mgpu(arg_types=(_tiled(), _loaded(2 * _LOADS)))
    def store_registers(ctx: Any, target: Any, loaded: Any) -> None:
        del ctx
        i8 = ir.IntegerType.get_signless(8)
        warp, lane_row, piece = _place_of_thread()
        tile_bytes = TILED_ROWS * _SWIZZLE_BYTES
        place = arith.addi(
            arith.muli(warp, _const(_LOADS * row_tiles * tile_bytes)), arith.muli(lane_row, _const(_SWIZZLE_BYTES))
        )
        pointer = utils.memref_ptr(target)
        for number, register in enumerate(loaded.registers.flat):
            group, part = divmod(number, _LOADS)
            begin = (part * row_tiles + column // PIECE_COLUMNS) * tile_bytes
            chunk = arith.xori(arith.addi(piece, _const(group * _ROW_THREADS)), lane_row)
            at = arith.addi(arith.addi(place, _const(begin)), arith.muli(chunk, _const(_LOAD_BYTES)))
            llvm.store(register, utils.getelementptr(pointer, [at], i8), alignment=_LOAD_BYTES)

    run: Any = store_registers
    run(target, loaded)


def stored() -> None:
    """After it, who learns by a barrier of this warpgroup's threads may multiply what they have stored."""
    if tiles.interpret_params() is not None:
        plgpu.commit_smem()
        return

    def fence(ctx: Any) -> None:
        del ctx
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    run: Any = plgpu.inline_mgpu()(fence)
    run()


def _tiled() -> Any:
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.RefType((tiling((TILED_ROWS, PIECE_COLUMNS)), swizzling(_SWIZZLE_BYTES)))


def _row_of_thread(rows: Any, layer: Any, rows_of_layer: int) -> Any:
    """A thread's row among those of all layers."""
    (row,) = rows.registers.flat
    row = _element(row)
    return arith.addi(arith.muli(_scalar(layer), _const(rows_of_layer)), row)


def _element(register: Any) -> Any:
    """The number in a register of one."""
    return llvm.extractelement(register, _const(0)) if isinstance(register.type, ir.VectorType) else register


def _loaded(loads: int) -> Any:
    return plgpu.Layout.WG_STRIDED((loads * _WORDS * _THREADS,), vec_size=_WORDS)


def _registers(of_thread: list[Any], size: int, *, signed: bool | None = True) -> Any:
    """An array of what each thread has: numbers, or words of loads."""
    vectors = np.empty(len(of_thread), dtype=object)
    for i, words in enumerate(of_thread):
        vectors[i] = _vector([words] if size == 1 else words)
    layout = mgpu.WGStridedFragLayout((len(of_thread) * size * _THREADS,), size)
    return mgpu.FragmentedArray(_registers=vectors, _layout=layout, _is_signed=signed)


def _vector(words: Any) -> Any:
    vector = llvm.mlir_undef(ir.VectorType.get((len(words),), words[0].type))
    for i, word in enumerate(words):
        vector = llvm.insertelement(vector, word, _const(i))
    return vector


def _widened(word: Any, name: str, factor: Any = None) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    registers = ".reg .b16 low, high, a, b; .reg .b32 pair; .reg .f32 x, y;"
    widen = _WIDEN[name if factor is None else f"{name}, scaled"]
    ptx = f"{{ {registers} mov.b32 {{low, high}}, $2; {widen} }}"
    return utils.inline_ptx(ptx, word, *(() if factor is None else (factor,)), result_types=[i32, i32])


def _place_of_thread() -> tuple[Any, Any, Any]:
    """A thread's warp, which of eight rows it loads, and which 16 bytes of 64."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), _const(_THREADS))
    lane = arith.remui(thread, _const(_WARP))
    warp = arith.divui(thread, _const(_WARP))
    return warp, arith.divui(lane, _const(_ROW_THREADS)), arith.remui(lane, _const(_ROW_THREADS))


def _const(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _scalar(splat: Any) -> Any:
    """The number that an array of one number is made of."""
    return splat.registers.item()
