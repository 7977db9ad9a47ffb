"""Flags that are EngineConfig's fields."""

import enum
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import typer

from jattn.serving.config import Knob, knobs

_PANEL = "Engine"


def takes_knobs(
    *, without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command has a flag for each knob that the command line has, and gets their values as keywords.

    Args:
        without: Those that have none for this command.
        defaults: Of those whose default is another one for this command; None is for the command to choose.
    """
    return lambda command: _with_flags(command, defaults, without)


def _with_flags(
    command: Callable[..., None], defaults: dict[str, Any], without: Collection[str]
) -> Callable[..., None]:
    found = {name: (field, knob) for name, (field, knob) in knobs().items() if knob.flag and name not in without}
    flags = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=(default := defaults.get(name, field.default)),
            annotation=_annotation(name, field, knob, default),
        )
        for name, (field, knob) in found.items()
    ]
    own = [parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != "knobs"]

    @functools.wraps(command)
    def with_knobs(**given: Any) -> None:
        chosen = {name: given[name].value for name in found if isinstance(given.get(name), enum.Enum)}
        command(**given | chosen)

    with_knobs.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    with_knobs.__annotations__ = command.__annotations__ | {flag.name: flag.annotation for flag in flags}
    return with_knobs


def _annotation(name: str, field: Any, knob: Knob, default: Any) -> Any:
    kind = typing.get_args(field.type)[0]
    declared = [f"--{name.replace('_', '-')}"]
    if kind == bool | None or default is True:
        declared = [f"{declared[0]}/--no-{declared[0][2:]}"]
    help_text = f"{knob.help} One of {', '.join(knob.choices)}." if knob.choices else knob.help
    options = typer.Option(*declared, help=help_text, rich_help_panel=_PANEL)
    if knob.choices:
        kind = enum.StrEnum(name, {choice: choice for choice in knob.choices})
        options.metavar = "NAME"
    elif kind == str | Mapping[str, Any] | None:
        kind, options.metavar = str, "JSON"
    elif kind in (str, str | None):
        options.metavar = "NAME"
    return Annotated[kind if default is not None else kind | None, options]
