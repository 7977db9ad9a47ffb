"""Loads and stores at places that are data, a number at a time: Pallas has none of them for Hopper."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jattn_kernels.mosaic.sm90.common import tiles


def scatter(
    target: Any, places: jax.Array, values: jax.Array | int, layout: Any, *, of: plgpu.RefType | None = None
) -> None:
    """target[places[i]] = values[i] for each i whose place is not below 0; of equal places one remains.

    Args:
        target: [N] of the values' dtype, in global or shared memory; on a GPU any contiguous one, by its flat places.
        places: int32, of this layout.
        values: Of this layout; or an int32 for all.
        of: The type of a target that lies otherwise than its shape says, by whose memory places are; on a GPU alone.
    """
    if tiles.interpret_params() is not None:

        @pl.loop(0, places.shape[0])
        def store(i):
            @pl.when(places[i] >= 0)
            def _():
                target[places[i]] = values if isinstance(values, int) else values[i]

        return
    arrays = (places,) if isinstance(values, int) else (places, values)

    @plgpu.inline_mgpu(arg_types=(of or plgpu.RefType(), *[layout] * len(arrays)))
    def store_registers(ctx, target, places, *of_places):
        del ctx
        for i, register in enumerate(places.registers.flat):
            for j in range(_count(register)):
                place = _scalar(register, j)
                with mgpu.when(_is_a_place(place)):
                    value = _scalar(of_places[0].registers.flat[i], j) if of_places else _constant(place.type, values)
                    llvm.store(value, utils.getelementptr(utils.memref_ptr(target), [place], value.type))

    store_registers(target, *arrays)


def set_bits(target: Any, places: jax.Array, bits: jax.Array, layout: Any) -> None:
    """target[places[i]] |= bits[i] for each i whose place is not below 0, whoever else sets bits of the same number.

    Args:
        target: int32 [N], in shared memory.
        places, bits: int32, of this layout.
    """
    if tiles.interpret_params() is not None:

        @pl.loop(0, places.shape[0])
        def add(i):
            @pl.when(places[i] >= 0)
            def _():
                target[places[i]] |= bits[i]

        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def set_registers(ctx, target, places, bits):
        del ctx
        for places_of, bits_of in zip(places.registers.flat, bits.registers.flat, strict=True):
            for j in range(_count(places_of)):
                place = _scalar(places_of, j)
                with mgpu.when(_is_a_place(place)):
                    pointer = utils.getelementptr(utils.memref_ptr(target), [place], place.type)
                    kind, order = llvm.AtomicBinOp._or, llvm.AtomicOrdering.monotonic
                    llvm.atomicrmw(kind, pointer, _scalar(bits_of, j), order)

    run: Any = set_registers
    run(target, places, bits)


def store_all(out: Any, places: jax.Array, values: jax.Array, layout: Any) -> None:
    """`store_at` of places none of which is below 0, on one axis or two: no number is asked about."""
    if tiles.interpret_params() is not None:
        store_at(out, places, values, layout)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def store_registers(ctx, target, places, values):
        del ctx
        for place, value in zip(places.registers.flat, values.registers.flat, strict=True):
            for j in range(_count(place)):
                number = _scalar(value, j)
                llvm.store(number, utils.getelementptr(utils.memref_ptr(target), [_scalar(place, j)], number.type))

    run: Any = store_registers
    run(out, places, values)


def store_at(out: Any, places: jax.Array, values: jax.Array, layout: Any, *, along: int = 0) -> None:
    """Numbers at flat places of an array of any shape; none where the place is below 0.

    Args:
        places: As of `scatter`, on one axis or two.
        along: Of two axes the one along which places follow one another, or are none.
    """
    if tiles.interpret_params() is None:
        scatter(out, places, values, layout)
        return
    places, values = (x[:, None] if x.ndim == 1 else jnp.moveaxis(x, along, 1) for x in (places, values))

    @pl.loop(0, places.shape[0])
    def store_run(i):
        begin, at = places[i, 0], []
        for size in reversed(out.shape):
            at, begin = [lax.rem(begin, size), *at], lax.div(begin, size)

        @pl.when(places[i, 0] >= 0)
        def _():
            out[(*at[:-1], pl.ds(at[-1], values.shape[1]))] = values[i]


def gather(source: Any, places: jax.Array, layout: Any) -> jax.Array:
    """source[places[i]], or source[0] where the place is below 0.

    Args:
        source: Of int32 or floats, in global or shared memory, by its flat places.
        places: int32, of this layout, which is the result's.
    """
    if tiles.interpret_params() is not None:
        numbers = source[...].reshape(-1)
        return numbers[jnp.maximum(places, 0)]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(places.shape, source.dtype, layout=layout),
    )
    def load_registers(ctx: Any, source: Any, places: Any) -> Any:
        del ctx
        i32, kind = ir.IntegerType.get_signless(32), ir.MemRefType(source.type).element_type
        loaded = places.registers.copy()
        for i, place in enumerate(loaded.flat):
            first = arith.constant(i32, 0)
            place_or_first = arith.select(_is_a_place(_scalar(place)), _scalar(place), first)
            value = llvm.load(kind, utils.getelementptr(utils.memref_ptr(source), [place_or_first], kind))
            is_vector = isinstance(place.type, ir.VectorType)
            loaded.flat[i] = vector.broadcast(ir.VectorType.get((1,), kind), value) if is_vector else value
        is_signed = places.is_signed if kind == i32 else None
        return mgpu.FragmentedArray(_registers=loaded, _layout=places.layout, _is_signed=is_signed)

    load: Any = load_registers
    return load(source, places)


def _constant(kind: Any, value: Any) -> Any:
    return arith.constant(kind, value)


def _is_a_place(place: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.sge, place, arith.constant(place.type, 0))


def _count(register: Any) -> int:
    """The numbers of a register, which is one or a vector of some."""
    return register.type.shape[0] if isinstance(register.type, ir.VectorType) else 1


def _scalar(register: Any, number: int = 0) -> Any:
    """One of a register's numbers."""
    if not isinstance(register.type, ir.VectorType):
        return register
    return llvm.extractelement(register, arith.constant(ir.IntegerType.get_signless(32), number))
