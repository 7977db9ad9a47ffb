"""The command line: `jattn generate`, `jattn serve`, `jattn compile`, `jattn bench` and `jattn doctor`."""

import os
from importlib.metadata import version
from typing import Annotated

import typer

from jattn.cli.bench_command import bench
from jattn.cli.compile_command import compile_checkpoint
from jattn.cli.generate_command import generate
from jattn.cli.help_page import Command, Group
from jattn.cli.output import check_output, writing
from jattn.cli.sentences import sentences_for_errors
from jattn.cli.serve_command import serve

_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # of a GPU's memory, that JAX takes when it is first used

# jax takes seconds to import, so the commands import the library when they run, and --help does not.

app = typer.Typer(
    name="jattn",
    cls=Group,
    help="Attention over a paged KV cache for JAX, and the serving loop around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(cls=Command)(generate)
app.command(cls=Command)(serve)
app.command(name="compile", cls=Command)(compile_checkpoint)
app.add_typer(bench)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"jattn {version('jattn')}")
        raise typer.Exit
    return wanted


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    os.environ.setdefault(_MEMORY_SHARE, "0.9")  # JAX's own is 0.75, and nobody else's process is to be served here


@app.command(cls=Command)
def doctor(
    capability: Annotated[
        str | None,
        typer.Option(
            metavar="X.Y",
            help="Show instead what serves each kind of call on an NVIDIA GPU of this compute capability, which this "
            "machine need not have.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the devices, what serves each kind of call and why, versions, and known clashes.

    The exit code is 1 if something is known not to work together.
    """
    with sentences_for_errors():
        check_output()

        from rich.console import Console

        from jattn.devices import started_devices
        from jattn.doctor import gather, gpu_of, show, show_served

        if capability is not None:
            device = gpu_of(capability)
            started_devices()  # what it says is of this machine, and not asked for
            with writing():
                show_served(device, Console())
            return
        facts = gather()
        with writing():
            if not show(facts, Console()):
                raise typer.Exit(1)
