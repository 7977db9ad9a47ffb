"""The command line: `jattn generate` and `jattn doctor`."""

import contextlib
import enum
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jattn.interrupts import Interrupts

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

# Where neither a flag nor the checkpoint says how to sample.
DEFAULT_SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class Speculative(enum.StrEnum):
    NGRAM = "ngram"
    DRAFT_MODEL = "draft-model"


class DType(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def _path(text: str) -> Path:
    if not text:
        raise typer.BadParameter("must not be empty.")
    return Path(text)


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
        Path | None,
        typer.Option(metavar="DIR", parser=_path, help="Hugging Face checkpoint folder; the bundled one by default."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text to continue; may be repeated.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=_path, help="More prompts, one a line; empty lines are skipped."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take prompts as a user's messages, by the checkpoint's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message before each, with --chat.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most, for each text.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="Tokens before an end token or stop string can end a text.")] = 0,
    n: Annotated[int, typer.Option("--n", help="Texts for each prompt.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(help="Of the sampling; 0 always takes the likeliest token. Default: the checkpoint's, or 0.8."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Sample among the k likeliest tokens; 0 is off. Default: the checkpoint's, or 0."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Then among those that hold this probability; 1 is off. Default: the checkpoint's, or 1."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="First drop tokens below this share of the likeliest one's probability; 0 is off. "
            "Default: the checkpoint's, or 0."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Weakens tokens that prompt or text have, by this factor; 1 is off. Default: the checkpoint's, or 1."
        ),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken from the logits of tokens that the text has, -2 to 2.")
    ] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, times how often the text has the token.")] = 0.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be repeated.", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling; the text's number by default.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end tokens.")] = False,
    dtype: Annotated[DType, typer.Option(help="Of weights, keys and values.")] = DType.AUTO,
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Of the KV pool: auto, which is the weights', fp8_e4m3 or fp8_e5m2.")
    ] = "auto",
    page_size: Annotated[int, typer.Option(help="Tokens in a page of the KV pool.")] = 16,
    num_pages: Annotated[
        int | None, typer.Option(help="Pages of the KV pool, the reserved one included; by default what fits.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Prompts served at the same time.")] = 8,
    max_context_len: Annotated[
        int | None, typer.Option(help="Longest text in tokens, prompt included; the model's own by default.")
    ] = None,
    speculative: Annotated[
        Speculative | None,
        typer.Option(
            help="Let each step verify drafted tokens: the same text in fewer steps. `ngram` drafts what followed the "
            "last tokens earlier on; `draft-model` asks a smaller model."
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens to draft in each step, with --speculative; 4 by default.")
    ] = None,
    draft_model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=_path, help="The draft model's checkpoint folder; the model's own by default."
        ),
    ] = None,
    draft_layers: Annotated[
        int | None, typer.Option(help="How many of its first layers the draft model has; all by default.")
    ] = None,
) -> None:
    """Continue prompts with a model.

    The text goes to standard output as it comes, a summary to standard error.
    Of a single prompt only the continuation is printed.
    Several prompts are printed one after another, each before its text.
    """
    with _sentences_for_errors():
        _check_output()

        from jattn.serving.request import SamplingParams

        given_prompts = [*(prompt or ()), *(_read_prompts(prompt_file) if prompt_file else ())]
        path = model or _default_checkpoint()
        flags = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
        given = {name: value for name, value in flags.items() if value is not None}
        sampling_params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            stop=tuple(stop or ()),
            seed=seed,
            ignore_eos=ignore_eos,
            **(_default_sampling(path) | given),
        )
        chats = _chats(path, given_prompts, system) if chat else None
        if system is not None and not chat:
            raise ValueError("`--system` needs `--chat`.")
        prompts = given_prompts or list(DEFAULT_PROMPTS)
        drafter = _drafter(speculative, num_draft_tokens, draft_model, draft_layers)

        with Interrupts() as interrupts:
            from jattn.serving.frontend.llm import LLM

            llm = LLM(
                path,
                dtype=dtype.value,
                kv_cache_dtype=kv_cache_dtype,
                page_size=page_size,
                num_pages=num_pages,
                max_num_seqs=max_num_seqs,
                max_context_len=max_context_len,
                full_sampling=sampling_params.has_logit_rules,
                speculative=drafter,
            )
            tokens = chats and [llm.tokenizer.encode(text, add_special_tokens=False) for text in chats]
            deltas = interrupts.deltas(llm.stream(tokens or prompts, sampling_params))
            errors = _print_text(deltas, [f"{text}\n\n" for text in prompts] if chat else prompts, n)
            _print_summary(llm.stats)
            for index, sentence in errors.items():
                typer.echo(f"error: Prompt {index + 1} of {len(prompts)}: {sentence}", err=True)
            if errors:
                raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Show the devices, what serves each kind of attention call and why, versions, and known clashes.

    The exit code is 1 if something is known not to work together.
    """
    with _sentences_for_errors():
        _check_output()

        from jattn.doctor import gather, show

        facts = gather()
        with _writing():
            if not show(facts, Console()):
                raise typer.Exit(1)


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


def _chats(path: Path, prompts: Sequence[str], system: str | None) -> list[str]:
    """What the checkpoint's chat template makes of each prompt; before the weights load, for it may refuse."""
    from jattn.serving.frontend.chat import ChatTemplate

    if not prompts:
        raise ValueError("`--chat` needs a `--prompt` or a `--prompt-file`.")
    template = ChatTemplate(path)
    before = [] if system is None else [{"role": "system", "content": system}]
    return [template.render([*before, {"role": "user", "content": prompt}]) for prompt in prompts]


def _drafter(
    speculative: Speculative | None, num_draft_tokens: int | None, draft_model: Path | None, layers: int | None
) -> Any:
    if speculative is None and num_draft_tokens is not None:
        raise ValueError("`--num-draft-tokens` needs `--speculative`.")
    if speculative is not Speculative.DRAFT_MODEL and (draft_model is not None or layers is not None):
        raise ValueError("`--draft-model` and `--draft-layers` need `--speculative draft-model`.")
    if speculative is None:
        return None
    given = {} if num_draft_tokens is None else {"num_draft_tokens": num_draft_tokens}
    if speculative is Speculative.NGRAM:
        from jattn.serving.steps.drafting import NgramDrafting

        return NgramDrafting(**given)
    from jattn.serving.steps.draft_model import DraftModel

    if draft_model is None and layers is None:
        raise ValueError("`--speculative draft-model` needs `--draft-model`, `--draft-layers` or both.")
    return DraftModel(checkpoint=draft_model, num_layers=layers, **given)


def _default_checkpoint() -> Path:
    for announced in entry_points(group="jattn.checkpoints", name="default"):
        return announced.load()()
    raise ValueError("`--model` must be given: no installed package brings a default checkpoint.")


def _default_sampling(path: Path) -> dict[str, Any]:
    """How the checkpoint's authors sample; one whose `do_sample` is false says nothing of it."""
    from jattn.checkpoint import Checkpoint

    config = Checkpoint(path).generation_config
    said = {} if config.get("do_sample") is False else {name: config.get(name) for name in DEFAULT_SAMPLING}
    for name, value in said.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{path / 'generation_config.json'} must give a number as `{name}`. Got {value!r}.")
    return DEFAULT_SAMPLING | {name: value for name, value in said.items() if value is not None}


def _print_text(deltas: Iterable[Any], prompts: Sequence[str], n: int = 1) -> dict[int, str]:
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


def _check_output() -> None:
    if sys.stdout is None:
        raise ValueError("Standard output must be open.")


@contextlib.contextmanager
def _writing() -> Iterator[None]:
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
    with _writing():
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
    if stats.drafts.steps:
        table.add_row("tokens a step", f"{stats.drafts.tokens_per_step:.2f}")
        table.add_row("drafted tokens accepted", f"{stats.drafts.accepted:,} of {stats.drafts.drafted:,}")
    console = Console(stderr=True, highlight=False)
    console.print()
    console.print(table)
