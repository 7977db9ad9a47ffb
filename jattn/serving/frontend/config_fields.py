"""Keyword arguments that are the fields of a dataclass, so that they are listed once."""

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate

from jattn.serving.config import knobs


def takes_fields_of[**Fields, Config](
    config_class: Callable[Fields, Config],
) -> Callable[[Callable[[Any, str | Path, Config], None]], Callable[Concatenate[Any, str | Path, Fields], None]]:
    """A decorator: `(self, path, config)` is then called with the configuration's fields as keywords."""

    def decorated(init: Callable[[Any, str | Path, Config], None]):
        @functools.wraps(init)
        def taking_fields(self: Any, path: str | Path, *args: Fields.args, **fields: Fields.kwargs) -> None:
            init(self, path, config_class(*args, **fields))

        before = list(inspect.signature(init).parameters.values())[:2]
        keywords = [
            parameter.replace(annotation=typing.get_args(parameter.annotation)[0])
            for parameter in inspect.signature(config_class).parameters.values()
        ]
        taking_fields.__signature__ = inspect.Signature([*before, *keywords])  # type: ignore[attr-defined]
        taking_fields.__doc__ = "\n".join(f"{name}: {knob.help}" for name, (_, knob) in knobs().items())
        return taking_fields

    return decorated
