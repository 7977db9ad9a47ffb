"""Help pages as typer's, but a flag that takes no value is not shown with one, and no flag's name is cut off."""

import copy
import shutil
from typing import Any

from typer.core import TyperCommand, TyperGroup

_NARROWEST_TABLE = 80  # columns of a terminal; in fewer a table would cut names off


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        TyperCommand.format_help(_as_shown(self), ctx, formatter)


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        TyperGroup.format_help(_as_shown(self), ctx, formatter)


def _without_values(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def _as_shown[Shown: (Command, Group)](command: Shown) -> Shown:
    """The command as its help page has it: without a table where the terminal is narrow, and flags that can be taken
    back under one name, as tables have a column for the other."""
    shown = copy.copy(command)
    if shutil.get_terminal_size().columns < _NARROWEST_TABLE:
        shown.rich_markup_mode = None
    shown.params = [_under_one_name(parameter) for parameter in command.params]
    return shown


def _under_one_name(parameter: Any) -> Any:
    if not parameter.secondary_opts:
        return parameter
    shown = copy.copy(parameter)
    shown.opts, shown.secondary_opts = [f"--[no-]{parameter.opts[0].removeprefix('--')}"], []
    return shown
