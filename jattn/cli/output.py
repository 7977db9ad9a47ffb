"""What the command line writes: texts to standard output, a summary and what goes on to standard error."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from jattn.cli.interrupts import Interrupts

_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Says on a terminal that the seconds before anything else shows are JAX's; Ctrl-C ends them quietly."""
    with Console(stderr=True).status("Starting JAX"), Interrupts():
        yield


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Prints jattn's log to standard error where that is no terminal, which shows bars instead."""
    if sys.stderr is None or sys.stderr.isatty():
        yield
        return
    logger, handler = logging.getLogger("jattn"), logging.StreamHandler(sys.stderr)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def print_text(deltas: Iterable[Any], prompts: Sequence[str], n: int = 1) -> dict[int, str]:
    """Prints the texts in the order of the prompts: the first unfinished one live, later ones once their turn comes.

    Args:
        n: Texts for each prompt.

    Returns:
        By prompt, why those that ended by an error did.
    """
    errors = {}
    prompts = [prompt for prompt in prompts for _ in range(n)]
    several = len(prompts) > 1
    waiting = [""] * len(prompts)
    finished = [False] * len(prompts)
    last_text = ""
    turn = 0
    if several:
        _print_prompt(prompts, turn)
    for delta in deltas:
        place = delta.index * n + delta.output_index
        waiting[place] += delta.text
        finished[place] = delta.finish_reason is not None
        if delta.error:
            errors[delta.index] = delta.error
        while turn < len(prompts):
            _write(waiting[turn])
            last_text, waiting[turn] = waiting[turn] or last_text, ""
            if not finished[turn]:
                break
            turn += 1
            if not last_text.endswith("\n"):
                _write("\n")
            last_text = ""
            if turn < len(prompts):
                _write("\n")
                _print_prompt(prompts, turn)
    return errors


def _print_prompt(prompts: Sequence[str], index: int) -> None:
    _write(f"==> {index + 1} of {len(prompts)} <==\n", dim=True)
    _write(prompts[index], bold=True)


def check_output() -> None:
    if sys.stdout is None:
        raise ValueError("Standard output must be open.")


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Turns a failed write to standard output into a ValueError; a closed pipe is left to typer, which ends quietly."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still buffered must go somewhere, or the interpreter's last flush fails too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ValueError(f"Standard output cannot be written: {error.strerror}.") from None


def _write(text: str, **style: bool) -> None:
    """Writes to standard output at once; a terminal gets no control characters, for a model may make any."""
    if not text:
        return
    if sys.stdout.isatty():
        text = text.translate(_CONTROL)
        text = typer.style(text, **style) if style else text
    encoding = sys.stdout.encoding or "utf-8"
    with writing():
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


def print_steps(records: Mapping[Any, Any], console: Console) -> None:
    """Prints which steps there are, how long they took, and how many of them were on disk: a line a kind and variant.

    Args:
        records: By `StepKey`.
    """
    table = Table("steps", "variant", "sizes", "on disk", "seconds", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    kinds: dict[tuple[str, str], list[Any]] = {}
    for key in records:
        kinds.setdefault((key.kind, key.variant), []).append(key)
    for (kind, variant), keys in kinds.items():
        loaded = sum(records[key].loaded for key in keys)
        seconds = sum(records[key].seconds for key in keys)
        sizes = ", ".join(str(key.size) for key in sorted(keys))
        table.add_row(kind.replace("_", " "), variant, sizes, f"{loaded} of {len(keys)}", f"{seconds:.1f}")
    console.print(table)


def print_summary(stats: Any) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_row("requests", f"{stats.requests:,}")
    table.add_row("prompt tokens", f"{stats.prompt_tokens:,}")
    table.add_row("generated tokens", f"{stats.generated_tokens:,}")
    rate = stats.generated_tokens / stats.seconds if stats.seconds else 0.0
    table.add_row("tokens/s", f"{rate:,.1f}")
    table.add_row("time to first token", f"{stats.time_to_first_token:.3f} s")
    table.add_row("pages used at peak", f"{stats.peak_pages:,} of {stats.num_pages:,}")
    if stats.drafts.steps:
        table.add_row("tokens a step", f"{stats.drafts.tokens_per_step:.2f}")
        table.add_row("drafted tokens accepted", f"{stats.drafts.accepted:,} of {stats.drafts.drafted:,}")
    console = Console(stderr=True, highlight=False)
    console.print()
    console.print(table)
