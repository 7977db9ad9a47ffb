"""The command line on an LLM that gives what a test tells it to, so that nothing is loaded or computed."""

import dataclasses
import types

from typer.testing import CliRunner

from jattn import cli
from jattn.compiled_steps import StepRecord
from jattn.serving.executor.step_plans import StepKey
from jattn.serving.request import DraftCounts


@dataclasses.dataclass
class Delta:
    index: int
    text: str
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = (0,)
    error: str | None = None
    output_index: int = 0


@dataclasses.dataclass
class Stats:
    requests: int = 3
    prompt_tokens: int = 1234
    generated_tokens: int = 60
    seconds: float = 4.0
    time_to_first_token: float = 0.25
    peak_pages: int = 7
    num_pages: int = 99
    drafts: DraftCounts = dataclasses.field(default_factory=DraftCounts)


class FakeLLM:
    """Gives the deltas, or raises the errors, that a test has put on the class."""

    deltas: list
    generation_config: dict
    stats = Stats()
    tokenizer = types.SimpleNamespace(
        encode=lambda text, *, add_special_tokens: "special " * add_special_tokens + f"tokens of {text}"
    )
    init_error = stream_error = None
    records = {  # noqa: RUF012
        StepKey("decode", 8, "greedy"): StepRecord(1.5, loaded=False),
        StepKey("decode", 4, "greedy"): StepRecord(0.25, loaded=True),
    }
    executor = types.SimpleNamespace(
        compiled_steps=types.SimpleNamespace(records=records),
        background=types.SimpleNamespace(left=3),
        memory_use=lambda: "all of it",
    )
    engine = types.SimpleNamespace(executor=executor)

    def __init__(self, path, **options):
        type(self).path, type(self).options = path, options
        if self.init_error:
            raise self.init_error

    def stream(self, prompts, sampling_params):
        type(self).prompts, type(self).sampling_params = prompts, sampling_params
        yield from self.deltas
        if self.stream_error:
            raise self.stream_error


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def generate(*arguments):
    return run("generate", "--model", "folder", *arguments)
