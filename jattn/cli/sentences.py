"""Errors as the command line tells them: one sentence for what the user can mend, Python's own for our bugs."""

import contextlib
from collections.abc import Iterator

import typer

from jattn.no_device import NoDeviceError

BAD_INPUT = (
    ValueError,
    NotImplementedError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    NoDeviceError,
)


@contextlib.contextmanager
def sentences_for_errors() -> Iterator[None]:
    """Turns bad input into one sentence and exit code 2, Ctrl-C into exit code 130; the rest is our bug and shows."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BAD_INPUT as error:
        sentence = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"error: {sentence}", err=True)
        raise typer.Exit(2) from None
