"""Chat templates: a conversation as the text that a checkpoint was trained to continue."""

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jattn.checkpoint import read_json
from jattn.serving.frontend.content_parts import with_fitting_content

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The chat template of a checkpoint folder, or several by name, as transformers reads and renders them.

    A template is a program of the checkpoint's authors: it runs in jinja's sandbox, reaches nothing but what it is
    given, and changes none of it.

    Args:
        folder: Holds the template as `chat_template.jinja`, or as `chat_template` in `tokenizer_config.json`; more may
            lie in `additional_chat_templates`. None of them need be there.

    Raises:
        ValueError: A file is not what it should be.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        config = self._json("special_tokens_map.json") | self._json("tokenizer_config.json")
        self.special_tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name)))}
        self._templates = self._read_templates(config.get("chat_template"))

    @property
    def is_there(self) -> bool:
        """Whether the folder has a template."""
        return bool(self._templates)

    def render(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        hints: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation. It has its own begin-of-text token, if the template writes one.

        Args:
            messages: A list of mappings. Each has a `role`, mostly "system", "user" or "assistant", and a `content`: a
                text, or a list of text parts. A template gets the form it was written for.
            add_generation_prompt: Whether the text ends with what opens the assistant's answer.
            tools: JSON schemas of functions that the model may call.
            chat_template: A template's name, or a template itself; None takes the one called "tool_use" if there are
                tools and it exists, or else the one called "default".
            chat_template_kwargs, variables: More of what this template knows.
            hints: More that it may know or not.

        Raises:
            ValueError: There is no template, the messages are none, or the template refuses them.
        """
        _check_messages(messages)
        template = self._choose(chat_template, bool(tools))
        variables = {**(chat_template_kwargs or {}), **variables}
        with _sentences_for_errors():
            environment = _environment()
            parsed, program = environment.parse(template), environment.from_string(template)
        known = jinja2.meta.find_undeclared_variables(parsed) | set(self.special_tokens)
        variables |= {name: value for name, value in (hints or {}).items() if name in known and name not in variables}
        if unknown := sorted(variables.keys() - known):
            raise ValueError(f"The chat template has no variable `{unknown[0]}`. It has {sorted(known)}.")
        given = {
            "documents": None,
            **self.special_tokens,
            **variables,
            "messages": with_fitting_content(messages, parsed),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        with _sentences_for_errors():
            return program.render(given)

    def _choose(self, chat_template: str | None, has_tools: bool) -> str:
        if chat_template is not None:
            if chat_template not in self._templates and "{" not in chat_template:
                raise ValueError(
                    "`chat_template` must be a template, or name one of the checkpoint's: "
                    f"{', '.join(sorted(self._templates)) or 'none'}. Got {chat_template!r}."
                )
            return self._templates.get(chat_template, chat_template)
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        if self._templates:
            raise ValueError(
                f"`chat_template` must name one of the checkpoint's templates, which has no default one: "
                f"{', '.join(sorted(self._templates))}. Got None."
            )
        raise ValueError(
            "The checkpoint has no chat template, neither `chat_template.jinja` nor `chat_template` in "
            f"`tokenizer_config.json`. Got {str(self.folder)!r}."
        )

    def _read_templates(self, configured: Any) -> dict[str, str]:
        if configured is None:
            templates = {}
        elif isinstance(configured, str):
            templates = {"default": configured}
        else:
            templates = self._named(configured)
        for file in sorted(self.folder.glob("additional_chat_templates/*.jinja")):
            templates[file.stem] = _read_text(file)
        if (single := self.folder / "chat_template.jinja").is_file():
            templates["default"] = _read_text(single)
        return templates

    def _named(self, configured: Any) -> dict[str, str]:
        entries = configured if isinstance(configured, list) else [None]
        if not all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
            for entry in entries
        ):
            raise ValueError(
                f"`chat_template` of {self.folder / 'tokenizer_config.json'} must be a text, or a list of objects "
                "with `name` and `template`."
            )
        return {entry["name"]: entry["template"] for entry in configured}

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name) if (self.folder / name).is_file() else {}


@contextlib.contextmanager
def _sentences_for_errors() -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"The chat template must be a jinja template: line {error.lineno}: {error}.") from error
    except Exception as error:  # a template can do whatever an expression can
        reason = str(error).rstrip(".") or type(error).__name__
        raise ValueError(f"The chat template cannot render these messages: {reason}.") from error


def _token_text(token: Any) -> str | None:
    """A special token's text, which the files give as such or within an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"A chat template must be UTF-8 text. Got {path}.") from None


def _check_messages(messages: Any) -> None:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not messages:
        raise ValueError(f"`messages` must be a list of at least one message. Got {messages!r}.")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"Each of `messages` must be a mapping with a `role`. Got {message!r}.")


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training: here its body alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As text for a model: jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
