"""Figures of a run: rates, and the percentiles of what its requests waited for."""

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jattn.load.client import Answer
from jattn.load.workload import Level

Row = dict[str, Any]

_LATENCIES = {
    "ttft_ms": "time to first token",
    "itl_ms": "between tokens",
    "tpot_ms": "a token after the first",
    "e2e_ms": "whole answer",
}
_PERCENTILES = (50, 90, 99)
_RATES = {
    "requests_per_s": "requests a second",
    "output_tokens_per_s": "output tokens a second",
    "total_tokens_per_s": "all tokens a second",
    "own_output_tokens_per_s": "the engine's own",
    "served_share": "served of the engine's own",
    "found_idle_share": "launches that found the device idle",
    "idle_share_at_least": "time that the device was idle, at least",
    "idle_share_at_most": "time that the device was idle, at most",
    "steady_idle_share_at_least": "the same while all run, at least",
    "steady_idle_share_at_most": "the same while all run, at most",
}


def figures(level: Level, answers: Sequence[Answer], prompt_lens: Sequence[int], seconds: float) -> Row:
    """Figures of a run; times in milliseconds.

    Time between tokens is that between two events of a stream: a server that is behind may put several tokens into one.
    """
    good = [answer for answer in answers if answer.error is None]
    inputs = sum(length for length, answer in zip(prompt_lens, answers, strict=True) if answer.error is None)
    outputs = sum(answer.num_tokens for answer in good)
    waits = {
        "ttft_ms": [answer.times[0] - answer.sent for answer in good],
        "itl_ms": [gap for answer in good for gap in np.diff(answer.times)],
        "tpot_ms": [(a.times[-1] - a.times[0]) / (a.num_tokens - 1) for a in good if a.num_tokens > 1],
        "e2e_ms": [answer.times[-1] - answer.sent for answer in good],
    }
    rate = None if level.rate is None else ("inf" if math.isinf(level.rate) else level.rate)
    return {
        "level": level.name,
        "concurrency": level.concurrency,
        "rate": rate,
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "errors": dict(collections.Counter(a.error for a in answers if a.error is not None).most_common(5)),
        "seconds": round(seconds, 3),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(outputs / seconds, 2),
        "total_tokens_per_s": round((inputs + outputs) / seconds, 2),
        **{name: _spread(values) for name, values in waits.items()},
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing."""
    if not seconds:
        return None
    ms = np.asarray(seconds) * 1e3
    found = {"mean": ms.mean(), **{f"p{p}": np.percentile(ms, p) for p in _PERCENTILES}}
    return {name: round(float(value), 3) for name, value in found.items()}


def show(rows: Iterable[Row], console: Any) -> None:
    """Prints a table, a column a run, and below it what failed."""
    from rich.table import Table

    rows = list(rows)
    table = Table()
    table.add_column("")
    for row in rows:
        table.add_column(row["level"], justify="right")
    table.add_row("requests", *(f"{row['requests']:,}" for row in rows))
    table.add_row("failed", *(f"{row['failed']:,}" for row in rows))
    for name, text in _RATES.items():
        if any(row.get(name) is not None for row in rows):
            table.add_row(text, *(_rate(name, row.get(name)) for row in rows))
    for name, text in _LATENCIES.items():
        for percentile in _PERCENTILES:
            cells = ["" if row[name] is None else f"{row[name][f'p{percentile}']:,.2f}" for row in rows]
            table.add_row(f"{text}, p{percentile} (ms)", *cells)
    console.print(table)
    for row in rows:
        for error, count in row["errors"].items():
            console.print(f"{row['level']}: {count} failed: {error}", highlight=False, markup=False)


def _rate(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if "share" in name else f"{value:,.1f}"
