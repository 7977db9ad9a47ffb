"""The cells of decode steps' rows in the README's tables."""

from bench.record_files import Row

Cells = tuple[str, ...]


def step_cells(row: Row) -> Cells:
    """A step by itself."""
    return (
        str(row["batch"]),
        f"{row['ctx']:,}",
        f"{row['time_ms']:.2f} ms",
        f"{row['roofline_share']:.0%}",
        f"{row['compile_s']:.1f} s",
    )


def cells_beside(row: Row, peer: Row) -> Cells:
    """A step beside another's."""
    batch, context, time, *others = step_cells(row)
    ratio = row["time_ms"] / peer["time_ms"]
    return batch, context, time, f"{peer['time_ms']:.2f} ms", f"{ratio:.2f}", *others


def quantized_cells(row: Row) -> Cells:
    """What a step's weights are held in, and its keys."""
    keys = "bf16" if row.get("kv", "bfloat16") == "bfloat16" else "fp8"
    return row["weights"], keys, *step_cells(row)


def model_of(row: Row) -> str:
    """Whose step it is."""
    return row["model"].partition(" shapes")[0]
