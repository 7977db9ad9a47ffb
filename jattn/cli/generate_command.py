"""`jattn generate`: the text that a model writes, on standard output."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jattn.cli.inputs import DEFAULT_PROMPTS, chats, default_checkpoint, model_folder, nonempty_path, read_prompts
from jattn.cli.interrupts import Interrupts
from jattn.cli.knob_flags import takes_knobs
from jattn.cli.output import check_output, logged, print_summary, print_text, starting
from jattn.cli.sentences import sentences_for_errors
from jattn.cli.speculation import DraftLayersFlag, DraftModelFlag, NumDraftTokensFlag, SpeculativeFlag, drafter

# Where neither a flag nor the checkpoint says how to sample.
DEFAULT_SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@takes_knobs()
def generate(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=nonempty_path, help="Hugging Face checkpoint folder; the bundled one by default."
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text to continue; may be repeated.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=nonempty_path, help="More prompts, one a line; empty lines are skipped."),
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
    speculative: SpeculativeFlag = None,
    num_draft_tokens: NumDraftTokensFlag = None,
    draft_model: DraftModelFlag = None,
    draft_layers: DraftLayersFlag = None,
    **knobs: Any,
) -> None:
    """Continue prompts with a model.

    The text goes to standard output as it comes, a summary to standard error.
    Of a single prompt only the continuation is printed.
    Several prompts are printed one after another, each before its text.
    """
    with sentences_for_errors():
        check_output()

        with starting():
            from jattn.devices import start_early

            start_early()
            from jattn.serving.request import SamplingParams

        given_prompts = [*(prompt or ()), *(read_prompts(prompt_file) if prompt_file else ())]
        path = default_checkpoint() if model is None else model_folder("--model", model)
        flags = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
        sampling_params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            stop=tuple(stop or ()),
            seed=seed,
            ignore_eos=ignore_eos,
            **_sampling(path, {name: value for name, value in flags.items() if value is not None}),
        )
        rendered = chats(path, given_prompts, system) if chat else None
        if system is not None and not chat:
            raise ValueError("`--system` needs `--chat`.")
        prompts = given_prompts or list(DEFAULT_PROMPTS)
        knobs["speculative"] = drafter(speculative, num_draft_tokens, draft_model, draft_layers)

        with Interrupts() as interrupts, logged():
            from jattn.serving.frontend.llm import LLM

            greedy_steps = sampling_params.temperature == 0
            llm = LLM(path, full_sampling=sampling_params.has_logit_rules, greedy_steps=greedy_steps, **knobs)
            tokens = rendered and [llm.tokenizer.encode(text, add_special_tokens=False) for text in rendered]
            deltas = interrupts.deltas(llm.stream(tokens or prompts, sampling_params))
            errors = print_text(deltas, [f"{text}\n\n" for text in prompts] if chat else prompts, n)
            print_summary(llm.stats)
            for index, sentence in errors.items():
                typer.echo(f"error: Prompt {index + 1} of {len(prompts)}: {sentence}", err=True)
            if errors:
                raise typer.Exit(1)


def _sampling(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    from jattn.checkpoint import Checkpoint
    from jattn.serving.frontend.default_sampling import default_sampling

    return DEFAULT_SAMPLING | default_sampling(Checkpoint(path).generation_config, path) | given
