"""What a chat says of tools: which there are, and whether the model may call them, must, or must call one."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from jattn.server.bodies import flag, shortened, typed
from jattn.server.tools.parser import ArrayParser, NamedParser, Parser, PlainParser
from jattn.server.tools.registry import TOOL_PARSERS
from jattn.serving.sampling_params import SamplingParams
from jattn.serving.structured.params import StructuredOutputsParams

_NAME = re.compile(r"[\w.:-]{1,64}")
_WHITESPACE = " ?"  # between the tokens of JSON that must be a call: more of it says nothing


@dataclasses.dataclass(frozen=True)
class AskedTools:
    """What a chat says of tools.

    Attributes:
        tools: For the chat template, as they came.
        structured_outputs: What the text must look like for a call that must come; None if none must.
        make_parser: Reads a text.
        is_parallel: Whether a message may have several calls.
        short_ids: Whether calls are named by 9 characters, as Mistral's templates demand.
    """

    tools: list[dict[str, Any]]
    structured_outputs: StructuredOutputsParams | None
    make_parser: Callable[[], Parser]
    is_parallel: bool
    short_ids: bool

    def params_of(self, params: SamplingParams) -> SamplingParams:
        """A request's parameters, with what the calls need: a form, or special tokens in the text, which tags may be.

        Raises:
            ValueError: The text is to have another form.
        """
        if self.structured_outputs is not None:
            if params.structured_outputs is not None:
                raise ValueError(
                    "A `tool_choice` that makes a call and a form of the text exclude each other. Got both."
                )
            return dataclasses.replace(params, structured_outputs=self.structured_outputs)
        if self.make_parser in TOOL_PARSERS.values():
            return dataclasses.replace(params, skip_special_tokens=False)
        return params


def asked_tools(body: dict[str, Any], tool_call_parser: str | None, *, is_auto_enabled: bool) -> AskedTools:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`.

    Args:
        tool_call_parser: The server's.
        is_auto_enabled: Whether a model may call tools where it does not have to.

    Raises:
        ValueError: One of them is not what it should be, or asks for what the server is not set up for.
    """
    tools = tools_of(body)
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    choice = body.get("tool_choice", "auto" if tools else "none")
    is_parallel = flag(body, "parallel_tool_calls", True)
    form, make_parser = None, PlainParser
    if choice == "auto" and tools:
        if tool_call_parser is None or not is_auto_enabled:
            raise ValueError(
                '`tool_choice` "auto" needs a server with `--enable-auto-tool-choice` and `--tool-call-parser`; '
                '"none", "required" or a tool\'s name need neither. Got "auto".'
            )
        make_parser = TOOL_PARSERS[tool_call_parser]
    elif choice == "required":
        if not functions:
            raise ValueError('`tool_choice` "required" needs `tools`. Got none.')
        form, make_parser = _form(_any_calls(functions, is_parallel)), ArrayParser
    elif isinstance(choice, dict):
        name = _chosen(choice, functions)
        form = _form(functions[name].get("parameters") or {"type": "object"})

        def make_parser() -> Parser:
            return NamedParser(name)

    elif choice not in ("none", "auto"):
        raise ValueError(
            f'`tool_choice` must be "none", "auto", "required" or name a function. Got {shortened(choice)}.'
        )
    return AskedTools(tools, form, make_parser, is_parallel, tool_call_parser == "mistral")


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools that a body has.

    Raises:
        ValueError: One is none.
    """
    tools = typed(body, "tools", list, "a list", [])
    for tool in tools:
        _check_tool(tool)
    return tools


def _check_tool(tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            'Each of `tools` must be {"type": "function", "function": {"name": ..., "parameters": ...}}, its name of '
            f"letters, digits, _, -, . and : alone. Got {shortened(tool)}."
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise ValueError(f"`parameters` of a tool must be a JSON schema. Got {shortened(function['parameters'])}.")


def _chosen(choice: dict[str, Any], functions: dict[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
    if not isinstance(name, str) or name not in functions:
        known = ", ".join(functions) or "none"
        raise ValueError(
            f"A `tool_choice` that is an object must name a function of `tools`: {known}. Got {shortened(choice)}."
        )
    return name


def _any_calls(functions: dict[str, Any], is_parallel: bool) -> dict[str, Any]:
    """The schema of an array of calls. Definitions within a tool's schema go to its beginning, as references say."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, dict[str, Any]] = {}
    for name, function in functions.items():
        parameters: dict[str, Any] = dict(function.get("parameters") or {"type": "object"})
        for key in ("$defs", "definitions"):
            found = parameters.pop(key, {})
            if not isinstance(found, dict):
                raise ValueError(f"`{key}` of a tool's `parameters` must be an object. Got {shortened(found)}.")
            for definition, content in found.items():
                if definitions.setdefault(key, {}).setdefault(definition, content) != content:
                    raise ValueError(f"Tools must not define different schemas of one name. Got two of {definition!r}.")
        properties = {"name": {"const": name}, "parameters": parameters}
        calls.append(
            {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    schema |= {key: content for key, content in definitions.items() if content}
    return schema if is_parallel else schema | {"maxItems": 1}


def _form(schema: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=json.dumps(schema), whitespace_pattern=_WHITESPACE)
