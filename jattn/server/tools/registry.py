"""Parsers by the names that vLLM gives them."""

from collections.abc import Callable

from jattn.server.tools.hermes import HermesParser
from jattn.server.tools.llama3_json import Llama3JsonParser
from jattn.server.tools.mistral import MistralParser
from jattn.server.tools.parser import Parser

TOOL_PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}

# Whether a model of that kind always thinks, though its text may not begin with the tag.
REASONING_PARSERS = {"deepseek_r1": True, "qwen3": False}


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
    if enable_auto_tool_choice and tool_call_parser is None:
        raise ValueError("`--enable-auto-tool-choice` needs `--tool-call-parser`. Got none.")
