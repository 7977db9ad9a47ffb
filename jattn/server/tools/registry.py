"""Parsers by the names that vLLM gives them."""

from collections.abc import Callable

from jattn.server.tools.harmony import HarmonyParser
from jattn.server.tools.hermes import HermesParser
from jattn.server.tools.llama3_json import Llama3JsonParser
from jattn.server.tools.mistral import MistralParser
from jattn.server.tools.parser import Parser

TOOL_PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "openai": HarmonyParser,
}

# Whether a model of that kind always thinks, though its text may not begin with the tag; None where channels tell.
REASONING_PARSERS: dict[str, bool | None] = {"deepseek_r1": True, "qwen3": False, "openai_gptoss": None}


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None, enable_auto_tool_choice: bool) -> None:
    """Says whether there are such parsers.

    Raises:
        ValueError: There are not.
    """
    given = (
        ("tool-call-parser", tool_call_parser, TOOL_PARSERS),
        ("reasoning-parser", reasoning_parser, REASONING_PARSERS),
    )
    for name, value, known in given:
        if value is not None and value not in known:
            raise ValueError(f"`--{name}` must be one of {', '.join(known)}. Got {value!r}.")
    if tool_call_parser == "openai" and reasoning_parser not in (None, "openai_gptoss"):
        raise ValueError(
            "`--reasoning-parser` must be openai_gptoss or none beside `--tool-call-parser openai`, which reads "
            f"channels. Got {reasoning_parser!r}."
        )
    if reasoning_parser == "openai_gptoss" and tool_call_parser not in (None, "openai"):
        raise ValueError(
            "`--tool-call-parser` must be openai or none beside `--reasoning-parser openai_gptoss`, which reads "
            f"channels. Got {tool_call_parser!r}."
        )
    if enable_auto_tool_choice and tool_call_parser is None:
        raise ValueError("`--enable-auto-tool-choice` needs `--tool-call-parser`. Got none.")
