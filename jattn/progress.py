"""What goes on while one waits: a bar on standard error where that is a terminal, elsewhere lines in jattn's log."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger("jattn")


@contextlib.contextmanager
def shown(what: str, total: int, *, wanted: bool) -> Iterator[Callable[[], None]]:
    """Shows that `total` things are done, while the context lasts.

    Args:
        what: What is done, as "Loading weights".
        wanted: Whether anything is shown.

    Returns:
        To be called after each of them.
    """
    on_terminal = sys.stderr.isatty()
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (wanted and on_terminal),
    )
    begin = time.perf_counter()
    if wanted and not on_terminal:
        logger.info("%s: %d", what, total)
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
    if wanted and not on_terminal:
        logger.info("%s took %.1f s", what, time.perf_counter() - begin)
