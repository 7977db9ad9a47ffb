"""Checks of the parts of a merge."""

from jattn_kernels.shapes.arrays import check_are_arrays, check_float, same_dtype


def check_merge(outs, lses) -> None:
    """Checks the parts of a merge.

    Raises:
        ValueError: `outs` and `lses` do not belong together, or there is no part.
    """
    check_are_arrays(outs=outs, lses=lses)
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or outs.shape[0] < 1:
        raise ValueError(
            "`lses` must have the shape of `outs` without its last axis, and at least one part. "
            f"Got outs.shape={outs.shape}, lses.shape={lses.shape}."
        )
    for name, array in (("outs", outs), ("lses", lses)):
        check_float(name, array)


def check_merge_of_two(out_a, lse_a, out_b, lse_b) -> None:
    """Checks that two parts can be stacked for a merge.

    Raises:
        ValueError: They are no arrays, or of different shapes or dtypes.
    """
    check_are_arrays(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    for name, a, b in (("out", out_a, out_b), ("lse", lse_a, lse_b)):
        if a.shape != b.shape:
            raise ValueError(
                f"`{name}_a` and `{name}_b` must be of one shape. "
                f"Got {name}_a.shape={a.shape}, {name}_b.shape={b.shape}."
            )
        same_dtype(f"{name}_a", a, f"{name}_b", b)
