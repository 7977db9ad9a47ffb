"""`jattn bench serve`: how fast a server answers, one that runs or one of its own."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from jattn.cli.help_page import Command, Group
from jattn.cli.inputs import default_checkpoint, model_folder, nonempty_path
from jattn.cli.knob_flags import takes_knobs
from jattn.cli.output import check_output, logged, starting, writing
from jattn.cli.sentences import sentences_for_errors

_VOCAB = 1000  # where the server's own is not known
_CONCURRENCY = "1,8,64,256"

bench = typer.Typer(name="bench", cls=Group, help="Measure how fast it is.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    pass


@takes_knobs(without=["compile_in_background"], max_num_seqs=None, prefill_tokens=None, max_context_len=None)
def bench_serve(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="CHECKPOINT",
            parser=nonempty_path,
            help="Hugging Face checkpoint folder to serve on loopback; the bundled one by default.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running server instead, of any make that speaks OpenAI's API."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="JATTN_API_KEY", help="What it wants.", show_default=False)
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help=f"Requests at a time, each followed by the next; a run for each number. Default: {_CONCURRENCY}.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="R,R,...",
            help="Instead, requests a second at random times; inf sends all at once. A run for each number.",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests of a run; by default four times as many as run at a time, 16 at least, or 1,000 at a rate.",
        ),
    ] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Random tokens of a prompt, on the average.")] = 1024,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer, on the average.")] = 128,
    spread: Annotated[
        float,
        typer.Option(
            "--range",
            min=0,
            max=1,
            help="Lengths are drawn from 1 - RANGE to 1 + RANGE times the average.",
            metavar="RANGE",
        ),
    ] = 0.0,
    prefix_len: Annotated[int, typer.Option(min=0, help="Tokens that all prompts of a run begin with.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", parser=nonempty_path, help="Write the figures there too."),
    ] = None,
    **knobs: Any,
) -> None:
    """Measure a server's time to first token, time between tokens and throughput, with random prompts.

    Without --url it serves CHECKPOINT itself, with the sizes of `jattn serve`, and measures the engine without the
    server too: the share of that rate which clients get is in the table. The client is a process of its own.
    """
    with sentences_for_errors():
        check_output()

        from jattn.load.workload import Workload

        if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
            raise ValueError(f"`--json` must be a file in a folder that is there. Got {json_file}.")
        levels = _levels(concurrency, rate, num_prompts)
        workload = Workload(
            input_len=input_len,
            output_len=output_len,
            spread=spread,
            prefix_len=prefix_len,
            vocab_size=_VOCAB,
            seed=seed,
        )
        if url is None:
            rows = _own_server(checkpoint, knobs, workload, levels)
        elif checkpoint is not None:
            raise ValueError("CHECKPOINT and `--url` must not be given together: the server has its model.")
        else:
            rows = _running_server(url, api_key, workload, levels)
        _tell(rows, workload, json_file)


bench.command(name="serve", cls=Command)(bench_serve)


def _levels(concurrency: str | None, rate: str | None, num_prompts: int | None) -> list[Any]:
    from jattn.load.workload import Level

    if concurrency is not None and rate is not None:
        raise ValueError("`--concurrency` and `--rate` must not be given together.")
    if rate is not None:
        return [Level(num_prompts=num_prompts or 1000, rate=number) for number in _numbers("--rate", rate, float)]
    numbers = _numbers("--concurrency", concurrency or _CONCURRENCY, int)
    return [Level(num_prompts=num_prompts or max(16, 4 * number), concurrency=number) for number in numbers]


def _numbers[Number: (int, float)](flag: str, text: str, kind: type[Number]) -> list[Number]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(math.isnan(number) or number <= 0 for number in numbers):
        raise ValueError(f"`{flag}` must be numbers above 0, with commas between them. Got {text!r}.")
    return numbers


def _own_server(checkpoint: Path | None, knobs: dict[str, Any], workload: Any, levels: list[Any]) -> list[Any]:
    import dataclasses

    with starting():
        from jattn.devices import start_early

        start_early()
    path = default_checkpoint() if checkpoint is None else model_folder("CHECKPOINT", checkpoint)
    with logged():
        from jattn.load.served import measured_served
        from jattn.server.device_sizes import sizes_for_device
        from jattn.serving.frontend.llm import LLM

        if knobs["max_context_len"] is None:
            knobs["max_context_len"] = workload.longest
        llm = LLM(path, compile_in_background=False, **sizes_for_device(knobs))
        workload = dataclasses.replace(workload, vocab_size=llm.tokenizer.vocab_size)
        return list(_shown(measured_served(llm, workload, levels)))


def _running_server(url: str, api_key: str | None, workload: Any, levels: list[Any]) -> list[Any]:
    import dataclasses

    from jattn.load.run import measured

    seeds = range(workload.seed, workload.seed + len(levels))
    each = (dataclasses.replace(workload, seed=seed) for seed in seeds)
    return list(_shown(measured(url, drawn, level, api_key=api_key) for drawn, level in zip(each, levels, strict=True)))


def _shown(rows: Any) -> Any:
    """The rows, each told of on standard error as it comes."""
    for row in rows:
        typer.echo(
            f"{row['level']}: {row['requests']:,} requests in {row['seconds']:,} s, {row['failed']:,} failed, "
            f"{row['output_tokens_per_s']:,} output tokens a second",
            err=True,
        )
        yield row


def _tell(rows: list[Any], workload: Any, json_file: Path | None) -> None:
    import dataclasses

    from rich.console import Console

    from jattn.load.figures import show

    with writing():
        show(rows, Console())
    if json_file is not None:
        content = {"workload": dataclasses.asdict(workload), "runs": rows}
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
