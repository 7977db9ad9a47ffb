"""StructuredOutputsParams: what a text must look like, as in vLLM."""

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from typing import Any

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@typing.no_type_check  # it checks its values itself
@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """What the whole text of a sequence must look like: exactly one of the first five says so.

    Attributes:
        json: A JSON schema, as a mapping or as JSON; kept as JSON.
        regex: A regular expression, in the syntax of Rust's.
        choice: Texts, of which it is one.
        grammar: A context-free grammar, in llguidance's dialect of Lark, or in GBNF.
        json_object: True for any JSON object.
        disable_any_whitespace: Whether JSON comes without whitespace.
        whitespace_pattern: A regular expression of the whitespace that JSON may have between its tokens; by default a
            space, or the end of a line and an indentation.
        disable_fallback: Of vLLM; nothing here falls back.
        disable_additional_properties, structural_tag: Of vLLM; here they can only be left as they are.

    Raises:
        ValueError: None says so, or several do, or a value is not what it should be. Whether a schema, an expression or
            a grammar can be served is checked with the request.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: None = None

    def __post_init__(self):
        for name in ("structural_tag", "disable_additional_properties"):
            if getattr(self, name):
                raise ValueError(f"`{name}` is not served: leave it out. Got {getattr(self, name)!r}.")
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ValueError(f"`structured_outputs` must have exactly one of {', '.join(_KINDS)}. Got {found}.")
        checked = {}
        if self.json is not None:
            checked["json"] = _schema(self.json)
        if self.choice is not None:
            checked["choice"] = _choices(self.choice)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None and not _is_text(value):
                raise ValueError(f"`{name}` must be a text that is not empty. Got {value!r}.")
        for name in ("json_object", "disable_fallback", "disable_any_whitespace"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"`{name}` must be True or False. Got {getattr(self, name)!r}.")


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(value.encode()) > 0
    except UnicodeEncodeError:
        return False


def _schema(value: Any) -> str:
    """A JSON schema as JSON; schemas that are alike are equal texts."""
    rule = "`json` must be a JSON schema: a mapping, or JSON of one."
    try:
        found = json.loads(value) if isinstance(value, str | bytes) else value
        if found is True:
            found = {}
        if not isinstance(found, Mapping):
            raise ValueError(f"{rule} Got {found!r}.")
        return json.dumps(found, ensure_ascii=False)
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, RecursionError) as error:
        raise ValueError(f"{rule} Got {_shortened(value)}: {error}.") from None


def _choices(values: Any) -> tuple[str, ...]:
    is_several = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
    texts: tuple[Any, ...] = tuple(values) if is_several else ()
    if not texts or not all(map(_is_text, texts)):
        raise ValueError(f"`choice` must be texts, none of them empty. Got {_shortened(values)}.")
    return texts


def _shortened(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "one that is nested too deep"
    return text if len(text) <= 100 else f"{text[:97]}..."
