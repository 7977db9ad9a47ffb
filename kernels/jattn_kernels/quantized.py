"""Weights in fp8 (e4m3), int4 or mxfp4, activations in fp8: what they are as arrays, how numbers are rounded to fp8."""

import dataclasses
import functools
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, Shaped

from jattn_kernels.interleaved import INPUTS
from jattn_kernels.shapes.arrays import FLOATS, check_are_arrays

FP8 = jnp.float8_e4m3fn
INT4 = jnp.int4
MXFP4 = jnp.uint8  # holds two numbers, the first in the low bits; and a scale, the exponent of a power of two
NUMBERS_OF_BYTE = 2  # of MXFP4
LARGEST = 448.0  # of FP8; what is above it would become NaN
_PART = float(np.float32(1 / LARGEST))  # a factor, as compilers make one of a constant that is divided by
_SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)  # devices may take smaller numbers for 0

ScalesKind = Literal["channel", "block", "group"]


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedKernel:
    """Weights of few bits and their factors: a number stands for itself times the scale of its block.

    Outputs come first: Hopper's tensor cores read 8-bit operands along the depth alone, and so checkpoints store them.

    Attributes:
        values: float8_e4m3fn; or int4, of which rows are not rounded to be multiplied with it; or, of experts alone,
            mxfp4's bytes, uint8 [*L, F, D / 2], of two inputs, the first in the low bits.
        scales: float32, of blocks of F / SF x D / SD numbers: SF = F and SD = 1 have a scale for each output channel,
            SF = SD = 1 one for the whole tensor. Of int4 [*L, G, F], bfloat16 and float16 too: one for each group of
            D / G inputs of an output, those of neighbouring outputs together, as they are read; of mxfp4 likewise, of
            32 inputs, uint8: exponents of two, 127 more.
        zero_points: Of int4, as many: what is taken from a number before it is scaled, -128 to 120; None of 0 alone.
        interleaved: Of int4, whether the inputs lie in the order of `interleaved.py`; static. Rows do not.
    """

    values: Shaped[Array, "*L F D"]
    scales: Float[Array, "*L SF SD"]
    zero_points: Int8[Array, "*L SF SD"] | None = None
    interleaved: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weights as they would be unquantised: [*L, D, F]."""
        *layers, outputs, inputs = self.values.shape
        return (*layers, inputs * (NUMBERS_OF_BYTE if self.dtype == MXFP4 else 1), outputs)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """Of the values."""
        return self.values.dtype

    @property
    def scales_kind(self) -> ScalesKind:
        """What has a scale of its own: an output channel, a block; in 4 bits a group of an output channel's inputs.

        One for the whole tensor is every channel's.
        """
        if self.dtype in (INT4, MXFP4):
            return "group"
        *_, outputs, inputs = self.scales.shape
        return "channel" if inputs == 1 and outputs in (1, self.values.shape[-2]) else "block"

    @property
    def group_size(self) -> int | None:
        """Inputs that share a scale, of groups; None of others."""
        return self.shape[-2] // self.scales.shape[-2] if self.scales_kind == "group" else None

    @property
    def may_be_interleaved(self) -> bool:
        """Whether it is in int4, and no group of inputs lies apart then."""
        return self.dtype == INT4 and self.shape[-2] % (self.scales.shape[-2] * INPUTS) == 0


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedRows:
    """Rows as `quantize_rows` rounds them, by the kernel that made them: for products with weights in FP8.

    Attributes:
        values: In FP8; rows past `num_rows` are any.
        scales: Of each row, and any numbers past these.
        num_rows: Static.
        dtype: That the rows had, and results get; static.
    """

    values: Float[Array, "R D"]
    scales: Float32[Array, " S"]
    num_rows: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, self.values.shape[1])

    @property
    def ndim(self) -> int:
        return 2


NormedRows = Float[Array, "T D"] | QuantizedRows  # of a norm, which may have rounded them


def quantize_rows(x: Float[Array, "*rows D"]) -> tuple[Float[Array, "*rows D"], Float32[Array, "*rows 1"]]:
    """Rows in FP8, and the float32 factor of each: its largest number's size times 1 / 448, or 1 of a row of zeros.

    Numbers are rounded to nearest, ties to even, and none overflows. A row with NaN or infinity becomes NaN, and no
    other does.

    Raises:
        ValueError: `x` is no array of float32, bfloat16 or float16 with an axis.
    """
    check_are_arrays(x=x)
    if x.dtype.name not in FLOATS or x.ndim < 1:
        raise ValueError(f"`x` must be [..., D] of {', '.join(FLOATS)}. Got x.shape={x.shape}, x.dtype={x.dtype}.")
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0).astype(jnp.float32)
    scales = scale_of(largest)
    values = x.astype(jnp.float32) / jnp.broadcast_to(scales, x.shape)
    return jnp.clip(values, -LARGEST, LARGEST).astype(FP8), scales


def scale_of(largest: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """The factor of a row whose largest number is of a size."""
    return jnp.where(largest == 0, 1.0, jnp.maximum(largest * _PART, _SMALLEST_SCALE))


def quantize_kernel(kernel: Float[Array, "*L F D"]) -> QuantizedKernel:
    """Weights with a scale for each output channel, outputs first in `kernel` too; rounded as by `quantize_rows`.

    Raises:
        ValueError: As `quantize_rows`.
    """
    values, scales = quantize_rows(kernel)
    return QuantizedKernel(values=values, scales=scales)


def check_quantized(kernel: QuantizedKernel, name: str = "kernel", axes: tuple[str, ...] = ("L",)) -> None:
    """Checks what a quantised kernel is made of.

    Args:
        name: What it is called in sentences.
        axes: What may lead its own two; some of the last of them, or all.

    Raises:
        ValueError: Its arrays are of another dtype, or do not go together.
    """
    values, scales, zero_points = kernel.values, kernel.scales, kernel.zero_points
    check_are_arrays(values=values, scales=scales)
    in_int4 = values.dtype == INT4
    if not (scales.dtype.name in FLOATS if in_int4 else values.dtype == FP8 and scales.dtype == jnp.float32):
        raise ValueError(
            f"`{name}` must have float8_e4m3fn values and float32 scales, or int4 values and scales of one of "
            f"{', '.join(FLOATS)}. Got values.dtype={values.dtype}, scales.dtype={scales.dtype}."
        )
    if zero_points is not None:
        check_are_arrays(zero_points=zero_points)
        if not in_int4 or zero_points.dtype != jnp.int8 or zero_points.shape != scales.shape:
            raise ValueError(
                f"`{name}` must have no zero points, or int4 values and int8 zero points, one for each scale. Got "
                f"values.dtype={values.dtype}, scales.shape={scales.shape}, zero_points.dtype={zero_points.dtype}, "
                f"zero_points.shape={zero_points.shape}."
            )
    if kernel.interleaved and not kernel.may_be_interleaved:
        raise ValueError(
            f"`{name}` may be interleaved only in int4, with groups of a multiple of {INPUTS} inputs. Got "
            f"values.dtype={values.dtype}, values.shape={values.shape}, scales.shape={scales.shape}."
        )
    alike = values.ndim == scales.ndim and values.ndim >= 2 and values.shape[:-2] == scales.shape[:-2]
    blocks = scales.shape[-2:][:: -1 if in_int4 else 1]
    divide = alike and not any(not few or many % few for many, few in zip(values.shape[-2:], blocks, strict=True))
    divide = divide and not (in_int4 and values.shape[-2] != blocks[0])
    shape, of_blocks = ("[G, F]", "G divides D") if in_int4 else ("[SF, SD]", "SF divides F and SD divides D")
    if not divide or values.ndim > 2 + len(axes):
        raise ValueError(
            f"`{name}` must have values [F, D] and scales {shape}, both perhaps after {', '.join(axes)}, where "
            f"{of_blocks}. Got values.shape={values.shape}, scales.shape={scales.shape}."
        )
