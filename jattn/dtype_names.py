"""Names of floating dtypes, as users of JAX, PyTorch and the engines know them."""

from typing import Any

import jax.numpy as jnp

DTYPE_NAMES = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def named_dtype(argument: str, value: Any, *, also: str = "") -> Any:
    """The dtype that is meant by one of DTYPE_NAMES, with or without `torch.` before it, or by a dtype itself.

    Args:
        argument: Told in the error.
        also: What else the argument may be, told there too.

    Raises:
        ValueError: It means none of these dtypes.
    """
    name = str(value) if isinstance(value, str) or type(value).__module__ == "torch" else _name_of(value)
    known = DTYPE_NAMES.get(name.removeprefix("torch."))
    if known is None:
        raise ValueError(f"`{argument}` must be {also}a dtype or one of {', '.join(DTYPE_NAMES)}. Got {value!r}.")
    return jnp.dtype(known)


def _name_of(dtype: Any) -> str:
    try:
        return "" if dtype is None else jnp.dtype(dtype).name  # NumPy takes None for float64
    except (TypeError, ValueError):
        return ""
