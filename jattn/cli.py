"""The command line: `jattn generate`."""

import contextlib
import enum
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

# jax takes seconds to import, so the commands import the library when they run, and --help does not.

app = typer.Typer(
    name="jattn",
    help="Attention over a paged KV cache for JAX, and the serving loop around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Beginnings that suit the default checkpoint, which has read Python's standard library.
DEFAULT_PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n    """',
    "import os\nimport sys\n\n\nclass Parser:\n    def __init__(self",
)

BAD_INPUT = (ValueError, NotImplementedError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)

_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class DType(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


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
    pass


@app.command()
def generate(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Hugging Face checkpoint folder; the bundled one by default.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text to continue; may be repeated.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="More prompts, one a line; empty lines are skipped.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most, for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of the sampling; 0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Then among those that hold this probability; 1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampling; the prompt's number by default.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end tokens.")] = False,
    dtype: Annotated[DType, typer.Option(help="Of weights, keys and values.")] = DType.AUTO,
    page_size: Annotated[int, typer.Option(help="Tokens in a page of the KV pool.")] = 16,
    num_pages: Annotated[
        int | None, typer.Option(help="Pages of the KV pool, the reserved one included; by default what fits.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Prompts served at the same time.")] = 8,
) -> None:
    """Continue prompts with a model.

    The text goes to standard output as it comes, a summary to standard error.
    Of a single prompt only the continuation is printed.
    Several prompts are printed one after another, each before its text.
    """
    with _sentences_for_errors():
        from jattn.serving.request import SamplingParams

        prompts = [*(prompt or ()), *(_read_prompts(prompt_file) if prompt_file else ())] or list(DEFAULT_PROMPTS)
        sampling_params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            ignore_eos=ignore_eos,
        )
        path = model or _default_checkpoint()

        from jattn.serving.llm import LLM

        llm = LLM(path, dtype=dtype.value, page_size=page_size, num_pages=num_pages, max_num_seqs=max_num_seqs)
        _print_text(llm.stream(prompts, sampling_params), prompts)
        _print_summary(llm.stats)


@contextlib.contextmanager
def _sentences_for_errors() -> Iterator[None]:
    """Turns bad input into one sentence and exit code 2, Ctrl-C into exit code 130; the rest is our bug and shows."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BAD_INPUT as error:
        sentence = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"error: {sentence}", err=True)
        raise typer.Exit(2) from None


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"`--prompt-file` must be UTF-8 text. Got {path}.") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"`--prompt-file` must hold at least one prompt. Got {path}.")
    return prompts


def _default_checkpoint() -> Path:
    for announced in entry_points(group="jattn.checkpoints", name="default"):
        return announced.load()()
    raise ValueError("`--model` must be given: no installed package brings a default checkpoint.")


def _print_text(deltas: Iterable[Any], prompts: Sequence[str]) -> None:
    """Prints the texts in the order of the prompts: the first unfinished one live, later ones once their turn comes."""
    several = len(prompts) > 1
    waiting = [""] * len(prompts)
    finished = [False] * len(prompts)
    last_text = ""
    turn = 0
    if several:
        _print_prompt(prompts, turn)
    for delta in deltas:
        waiting[delta.index] += delta.text
        finished[delta.index] = delta.finish_reason is not None
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


def _print_prompt(prompts: Sequence[str], index: int) -> None:
    typer.secho(f"==> {index + 1} of {len(prompts)} <==", dim=True)
    _write(prompts[index], bold=True)


def _write(text: str, *, bold: bool = False) -> None:
    """Writes to standard output at once; a terminal gets no control characters, for a model may make any."""
    if not text:
        return
    if sys.stdout.isatty():
        text = text.translate(_CONTROL)
        text = typer.style(text, bold=True) if bold else text
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _print_summary(stats: Any) -> None:
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
    console = Console(stderr=True, highlight=False)
    console.print()
    console.print(table)
