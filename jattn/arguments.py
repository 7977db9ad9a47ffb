"""What a caller hands over, checked before use: what cannot be used becomes a sentence that has the caller's name."""

import contextlib
import math
import operator
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def whole_number(value: Any, rule: str, least: int, below: int | float = math.inf) -> int:
    """`value` as an int, of whatever integer type it was.

    Raises:
        ValueError: It is no integer, or out of range; the message is `rule` and the value.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number < below:
        raise ValueError(f"{rule} Got {value!r}.")
    return number


def whole(name: str, value: Any, least: int = 1) -> int:
    """As `whole_number`, of 32 bits, by the argument's name."""
    return whole_number(value, f"`{name}` must be a whole number of at least {least}.", least, 2**31)


def check_whole(holder: Any, *names: str, least: int = 1, optional: bool = False) -> None:
    """Makes ints of fields of a frozen dataclass.

    Args:
        optional: None stays None.

    Raises:
        ValueError: A field is no whole number of at least `least`.
    """
    off = "None or " if optional else ""
    for name in names:
        value = getattr(holder, name)
        if value is not None or not optional:
            rule = f"`{name}` must be {off}a whole number of at least {least}."
            object.__setattr__(holder, name, whole_number(value, rule, least, 2**31))


def number(name: str, value: Any) -> float:
    """`value` as a float, of whatever real type it was.

    Raises:
        ValueError: It is no finite number, or is traced.
    """
    try:
        result = math.nan if isinstance(value, str | bool) or np.ndim(value) else float(value)
    except (TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        raise ValueError(f"`{name}` must be a finite number, known outside jit. Got {value!r}.")
    return result


def check_array(name: str, value: Any, *axes: str) -> None:
    """Checks that a value is an array of JAX or NumPy.

    Args:
        axes: What its axes are called, for the sentence; none if any number will do.

    Raises:
        ValueError: It is no array, or has another number of axes.
    """
    is_array = isinstance(value, jax.Array | np.ndarray)
    if not is_array or (axes and value.ndim != len(axes)):
        form = f" [{', '.join(axes)}]" if axes else ""
        raise ValueError(f"`{name}` must be an array{form} of JAX or NumPy. Got {shown(name, value)}.")


def array(name: str, value: Any, *axes: str) -> jax.Array:
    """As `check_array`; NumPy's as JAX's, but for one of 64 bits: no dtype is changed in silence."""
    check_array(name, value, *axes)
    return jnp.asarray(value) if jax.dtypes.canonicalize_dtype(value.dtype) == value.dtype else value


def integers(name: str, values: Any, *axes: str) -> jax.Array:
    """Whole numbers as an array of int32, from an array or a list of any integer type.

    Raises:
        ValueError: They are none, have other axes than these, or do not fit 32 bits.
    """
    if not isinstance(values, jax.Array):
        return jnp.asarray(host_integers(name, values, *axes))
    _check_integers(name, values, values, axes)
    return values.astype(jnp.int32)


def host_integers(name: str, values: Any, *axes: str) -> np.ndarray:
    """As `integers`, on the host."""
    try:
        found = np.asarray(values)
    except (TypeError, ValueError):  # they are traced, or rows of unequal lengths
        found = None
    if found is not None and isinstance(values, list | tuple) and not values:
        found = np.zeros(0, np.int32)
    _check_integers(name, found, values, axes)
    assert found is not None
    check_int32_range(name, found)
    return found.astype(np.int32)


def _check_integers(name: str, found: Any, given: Any, axes: tuple[str, ...]) -> None:
    if found is None or found.ndim != len(axes) or not jnp.issubdtype(found.dtype, jnp.integer):
        raise ValueError(f"`{name}` must be integers [{', '.join(axes)}]. Got {shown(name, given)}.")


def check_int32_range(name: str, values: np.ndarray) -> None:
    """Checks integers on the host.

    Raises:
        ValueError: One does not fit 32 bits.
    """
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise ValueError(f"`{name}` must fit 32 bits. Got {values.min()} to {values.max()}.")


def check_offsets(name: str, offsets: np.ndarray) -> None:
    """Checks where the rows of each request begin, and where the last one's end.

    Raises:
        ValueError: They do not rise from 0.
    """
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"`{name}` must start at 0 and never fall. Got {name}={offsets.tolist()}.")


def scale_arrays(**scales: Any) -> dict[str, Any]:
    """Scales as kernels take them, by their names: numbers, arrays of one for each KV head, or None.

    Raises:
        ValueError: One is no number and no array of numbers.
    """
    return {name: None if scale is None else _scale(name, scale) for name, scale in scales.items()}


def _scale(name: str, scale: Any) -> jax.Array:
    try:
        return jnp.asarray(scale, jnp.float32)
    except (TypeError, ValueError) as error:
        rule = f"`{name}` must be None, a number, or an array of one a KV head."
        raise ValueError(f"{rule} Got {shown(name, scale)}.") from error


def instance(name: str, value: Any, *kinds: type) -> None:
    """Checks what an argument is.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"`{name}` must be of type {wanted}. Got {shown(name, value)}.")


def check_fields(name: str, value: Any, *fields: str) -> None:
    """Checks that an argument, of whatever type, has what is read of it.

    Raises:
        ValueError: It has not.
    """
    if missing := [field for field in fields if not hasattr(value, field)]:
        raise ValueError(f"`{name}` must have `{'`, `'.join(missing)}`. Got {shown(name, value)}.")


def shown(name: str, value: Any) -> str:
    """What an error tells of an argument: an array's shape and dtype, and of anything else as little as will do."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"{name}.shape={value.shape}, {name}.dtype={value.dtype}"
    if value is None or isinstance(value, str | int | float | Tracer):
        return f"{name}={value!r}"
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"{name}: {type(value).__name__}{size}"


@contextlib.contextmanager
def in_words(**words: str) -> Iterator[None]:
    """Has the errors from below speak of arguments as the caller knows them; a context, or around a function.

    Args:
        words: For a name below, what it is called here. It is replaced where a sentence quotes it, or tells its value,
            shape or dtype.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if words and error.args and isinstance(error.args[0], str):
            names = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
            pattern = rf"(?<![\w.])({names})(?=`|\.shape|\.dtype| ?=)"
            error.args = (re.sub(pattern, lambda match: words[match[1]], error.args[0]), *error.args[1:])
        raise
