"""What a warp does on its own inside a kernel: matrices from shared memory, products, registers of wgmma's layout."""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

_OPERANDS = (0, 4), (4, 8), (8, 10), (10, 14)


def multiplied(weights: list[Any], rows: list[Any], sums: list[Any], dtype: Any) -> list[Any]:
    """The sums with a product of 16 weights and 8 rows, 16 numbers deep (mma.sync).

    Args:
        weights: Four words of a thread.
        rows: Two.
        sums: Four numbers of float32.
        dtype: MLIR's name of that of weights and rows, bf16 or f16.
    """
    assert str(dtype) in ("bf16", "f16")
    results, of_weights, of_rows, before = ("{" + ", ".join(f"${i}" for i in range(*ends)) + "}" for ends in _OPERANDS)
    return list(
        utils.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {results}, {of_weights}, {of_rows}, {before};",
            *weights,
            *rows,
            *sums,
            result_types=[ir.F32Type.get()] * 4,
            convergent=True,
        )
    )


def matrices(pointer: Any, count: int) -> list[Any]:
    """A word of each of so many matrices of 8 x 16 bytes (ldmatrix); a thread points to a row of one."""
    loaded = nvvm.ldmatrix(
        pointer,
        num=count,
        layout=nvvm.MMALayout.row,
        shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
        elt_type=nvvm.LdStMatrixEltType.B16,
    )
    return [llvm.extractvalue(i32(), loaded, [i]) for i in range(count)]


def register_place(tile: int, eight: int, half: int) -> tuple[int, ...]:
    """Where a register is in wgmma's layout: of 64 rows, 8 columns, and the upper or lower 8 rows of a warp's 16."""
    return (tile, eight, 0, 0, half, 0, 0, 0, 0)


def two(register: Any) -> list[Any]:
    """A register's two numbers."""
    return [llvm.extractelement(register, const(number)) for number in range(2)]


def pair(first: Any, second: Any) -> Any:
    """A register of two numbers."""
    both = llvm.mlir_undef(ir.VectorType.get((2,), first.type))
    return llvm.insertelement(llvm.insertelement(both, first, const(0)), second, const(1))


def i32() -> Any:
    """The type of a word."""
    return ir.IntegerType.get_signless(32)


def const(value: int) -> Any:
    """A word of this value."""
    return arith.constant(i32(), value - (1 << 32) if value >> 31 else value)
