"""What any argument is checked for: that it is an array, of a dtype, a shape, a size."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn_kernels.spec import AttentionSpec, is_whole

FLOATS = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")


def check_are_arrays(**values) -> None:
    """Checks that all are arrays, of JAX, of NumPy or traced.

    Raises:
        ValueError: One has no shape or dtype.
    """
    for name, value in values.items():
        if not all(hasattr(value, fact) for fact in ("ndim", "shape", "dtype")):
            raise ValueError(f"`{name}` must be an array of JAX or NumPy. Got {brief(value)}.")


def brief(value) -> str:
    """What a value is, for a sentence: its type, or None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_spec(spec) -> None:
    """Checks that it is one.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(spec, AttentionSpec):
        raise ValueError(f"`spec` must be an AttentionSpec. Got {brief(spec)}.")


def check_sizes(**sizes) -> None:
    """Checks that all are counts of something.

    Raises:
        ValueError: One is no whole number, or below 1.
    """
    for name, size in sizes.items():
        if not is_whole(size) or size < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1. Got {name}={size!r}.")


def check_axes(name: str, array, axes: tuple[str, ...]) -> None:
    """Checks how many axes an array has.

    Raises:
        ValueError: Another number.
    """
    if array.ndim != len(axes):
        raise ValueError(f"`{name}` must be [{', '.join(axes)}]. Got {name}.shape={array.shape}.")


def check_int32(name: str, array, shape: tuple[int, ...]) -> None:
    """Checks that `array` is an array, of int32 and of this shape.

    Raises:
        ValueError: It is not.
    """
    check_are_arrays(**{name: array})
    if array.dtype != jnp.int32 or array.shape != shape:
        raise ValueError(
            f"`{name}` must be int32 {list(shape)}. Got {name}.dtype={array.dtype}, {name}.shape={array.shape}."
        )


def check_float(name: str, array) -> None:
    """Checks that an array is of a dtype that is taken.

    Raises:
        ValueError: It is not.
    """
    if array.dtype.name not in FLOATS + FP8:
        raise ValueError(f"`{name}` must be one of {', '.join(FLOATS + FP8)}. Got {name}.dtype={array.dtype}.")


def same_dtype(name_a: str, a, name_b: str, b) -> None:
    """Checks that two arrays have one dtype.

    Raises:
        ValueError: They do not.
    """
    if a.dtype != b.dtype:
        raise ValueError(
            f"`{name_a}` and `{name_b}` must have one dtype. Got {name_a}.dtype={a.dtype}, {name_b}.dtype={b.dtype}."
        )


def check_dtypes(q_name: str, q, kv_name: str, kv) -> None:
    """Checks that queries and keys are of one dtype, or the keys fp8.

    Raises:
        ValueError: They are not.
    """
    for name, array in ((q_name, q), (kv_name, kv)):
        check_float(name, array)
    if q.dtype.name in FP8 and kv.dtype.name not in FP8:
        raise ValueError(
            f"`{q_name}` in fp8 needs `{kv_name}` in fp8. Got {q_name}.dtype={q.dtype}, {kv_name}.dtype={kv.dtype}."
        )
    if kv.dtype.name not in FP8:
        same_dtype(q_name, q, kv_name, kv)


def check_layer_index(layer_index, num_layers: int) -> None:
    """Checks which of some layers is meant, as far as its value is known.

    Raises:
        ValueError: It is no integer, or out of range.
    """
    if isinstance(layer_index, bool) or not (isinstance(layer_index, int) or hasattr(layer_index, "dtype")):
        raise ValueError(f"`layer_index` must be an int or an int32 scalar. Got layer_index={layer_index!r}.")
    if not isinstance(layer_index, int | np.integer):
        check_int32("layer_index", layer_index, ())
    # JAX would wrap -1 to the last layer and clamp what lies past it.
    if not isinstance(layer_index, Tracer) and not 0 <= int(layer_index) < num_layers:
        raise ValueError(f"`layer_index` must be in 0 .. {num_layers - 1}. Got layer_index={int(layer_index)}.")


def check_one_row_a_sequence(name: str, q, seq_lens) -> None:
    """Checks that decode's queries have a row for each sequence.

    Raises:
        ValueError: They do not.
    """
    if q.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            f"`{name}` must have one row of queries a sequence. "
            f"Got {name}.shape={q.shape}, seq_lens.shape={seq_lens.shape}."
        )
