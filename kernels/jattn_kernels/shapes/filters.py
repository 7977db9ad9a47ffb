"""What the operands of kept tokens are checked for."""

from jattn_kernels.shapes.arrays import FLOATS, check_are_arrays, check_axes, check_int32


def check_filters(logits, *, temperature, top_k, top_p, min_p) -> None:
    """Checks that there is a number of each kind for each row of logits.

    Raises:
        ValueError: There is not.
    """
    check_are_arrays(logits=logits)
    check_axes("logits", logits, ("B", "V"))
    if logits.dtype.name not in FLOATS or logits.shape[1] == 0:
        raise ValueError(
            f"`logits` must be of some tokens, in one of {', '.join(FLOATS)}. "
            f"Got logits.dtype={logits.dtype}, logits.shape={logits.shape}."
        )
    rows = logits.shape[:1]
    check_int32("top_k", top_k, rows)
    for name, numbers in {"temperature": temperature, "top_p": top_p, "min_p": min_p}.items():
        check_are_arrays(**{name: numbers})
        if numbers.dtype.name != "float32" or numbers.shape != rows:
            raise ValueError(
                f"`{name}` must be float32 {list(rows)}. "
                f"Got {name}.dtype={numbers.dtype}, {name}.shape={numbers.shape}."
            )
