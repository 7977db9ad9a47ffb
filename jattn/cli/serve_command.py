"""`jattn serve`: an HTTP server that speaks OpenAI's API."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jattn.cli.inputs import CheckpointArgument, default_checkpoint, model_folder
from jattn.cli.knob_flags import takes_knobs
from jattn.cli.output import logged, print_steps, starting
from jattn.cli.sentences import sentences_for_errors
from jattn.cli.speculation import DraftLayersFlag, DraftModelFlag, NumDraftTokensFlag, SpeculativeFlag, drafter


@takes_knobs(max_num_seqs=None, prefill_tokens=None, compile_in_background=True)
def serve(
    checkpoint: CheckpointArgument = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is all of this machine's. Default: this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="JATTN_API_KEY",
            help="What clients must send as `Authorization: Bearer KEY`; may be repeated.",
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What clients call the model; may be repeated. Default: the checkpoint's folder.",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE|TEXT", help="A jinja template in place of the checkpoint's, or the file of one."),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option("--enable-auto-tool-choice", help="Let models call tools where they do not have to."),
    ] = False,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How the model writes calls of tools: hermes, llama3_json, mistral or openai."
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How the model writes its reasoning: qwen3, deepseek_r1 or openai_gptoss."),
    ] = None,
    max_queued: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Sequences that may wait beyond --max-num-seqs; more are told to come again (503)."
        ),
    ] = 4096,
    max_body_mib: Annotated[
        float, typer.Option(min=0, metavar="MIB", help="Size of a request's body at most, in MiB (413).")
    ] = 32.0,
    drain_seconds: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="What running requests get to end after SIGTERM or the first Ctrl-C."
        ),
    ] = 30.0,
    watchdog_seconds: Annotated[
        float,
        typer.Option(
            min=1, metavar="SECONDS", help="A step that takes so long hangs: stacks are dumped and the server ends."
        ),
    ] = 300.0,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="So many engines behind the address, by Ray Serve (the extra `ray`); one that fails is started anew.",
            show_default=False,
        ),
    ] = None,
    by_prefix: Annotated[
        bool,
        typer.Option(
            "--by-prefix",
            help="Whether a request goes to the replica that was sent others which begin alike.",
        ),
    ] = False,
    speculative: SpeculativeFlag = None,
    num_draft_tokens: NumDraftTokensFlag = None,
    draft_model: DraftModelFlag = None,
    draft_layers: DraftLayersFlag = None,
    **knobs: Any,
) -> None:
    """Serve a model over HTTP, to any client of OpenAI's API.

    Unless told, 256 requests run at once and a launch has up to 2,048 tokens with prompts; on a CPU 8, and 256.
    SIGTERM or Ctrl-C ends it once running requests have ended; the second one ends it at once.
    The exit code is 1 if the engine could not go on.
    """
    with sentences_for_errors():
        if by_prefix and replicas is None:
            raise ValueError("`--by-prefix` must come with `--replicas`, among which it chooses.")
        if any(key.strip() != key or not key for key in api_key or ()):
            raise ValueError("`--api-key` must have text, and no space around it: any client could send nothing.")
        if replicas is None:
            with starting():
                from jattn.devices import start_early

                start_early()

        path = default_checkpoint() if checkpoint is None else model_folder("CHECKPOINT", checkpoint)
        knobs["speculative"] = drafter(speculative, num_draft_tokens, draft_model, draft_layers)
        template = None if chat_template is None else _read_template(chat_template)
        with logged():
            from jattn.server.run import Lifetime, bound_socket, run, url_of
            from jattn.server.service import ServiceOptions
            from jattn.server.tools.registry import check_parsers

            check_parsers(tool_call_parser, reasoning_parser, enable_auto_tool_choice)
            listening = bound_socket(host, port)
            options = ServiceOptions(
                model_names=tuple(served_model_name or ()) or (path.resolve().name,),
                api_keys=tuple(api_key or ()),
                chat_template=template,
                enable_auto_tool_choice=enable_auto_tool_choice,
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
                max_queued=max_queued,
                max_body_bytes=int(min(max_body_mib * 2**20, sys.maxsize)),
            )
            lifetime = Lifetime(drain_seconds=drain_seconds, watchdog_seconds=watchdog_seconds)
            name, url = options.model_names[0], url_of(listening)
            if replicas is not None:
                from jattn.server import ray

                def tell() -> None:
                    typer.echo(f"Serving {name} by {replicas} replicas at {url}/v1", err=True)

                chosen = {"num_replicas": replicas, "by_prefix": by_prefix}
                ray.run(path, options, listening, lifetime, tell, **chosen, **knobs)
                return

            from jattn.server.device_sizes import sizes_for_device
            from jattn.serving.frontend.llm import LLM

            llm = LLM(path, **sizes_for_device(knobs))
            _tell_steps(llm.engine.executor)
            ended_well = run(
                llm, options, listening, lifetime, lambda: typer.echo(f"Serving {name} at {url}/v1", err=True)
            )
        if not ended_well:
            _leave()


def _tell_steps(executor: Any) -> None:
    from rich.console import Console

    print_steps(executor.compiled_steps.records, Console(stderr=True))
    typer.echo(f"Memory: {executor.memory_use()}", err=True)
    if left := executor.background.left:
        typer.echo(f"Steps that are compiled while the server serves: {left}", err=True)


def _leave() -> None:
    """Ends the process though a thread hangs, or the device does: the interpreter would wait for them."""
    import os

    sys.stderr.flush()
    os._exit(1)


def _read_template(given: str) -> str:
    """A template as it stands, or what its file has."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`--chat-template` must be a template or a UTF-8 file of one. Got {given}: {error}."
        ) from None
