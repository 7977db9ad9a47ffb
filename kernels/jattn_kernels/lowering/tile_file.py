"""Tile sizes that `python -m bench.tune` found best on a GPU, in place of a heuristic's.

A file of them, one JSON object a line, is named by an environment variable.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any


class TileFile:
    """What a variable's file says.

    Args:
        variable: Name of the environment variable.
        shape: Named tuple of what the best sizes depend on: whole numbers from 1, words and truths.
        sizes: Named tuple of what is chosen: whole numbers from 1.
    """

    def __init__(self, variable: str, shape: Any, sizes: Any):
        self.variable = variable
        self._shape, self._sizes = shape, sizes

    def tuned(self, shape: Any) -> Any:
        """What the file says of a shape; None if it says nothing, or none is named.

        Raises:
            ValueError: The file cannot be read as such.
        """
        name = os.environ.get(self.variable)
        return self.read(name).get(shape) if name else None

    @functools.cache  # noqa: B019 (there is one object a variable)
    def read(self, name: str) -> dict[Any, Any]:
        """All that a file says; read once.

        Raises:
            ValueError: It cannot be read, or a line is not what `line` writes.
        """
        found = {}
        try:
            for text in Path(name).read_text(encoding="utf-8").splitlines():
                row = json.loads(text)
                shape, sizes = (of(**{field: row[field] for field in of._fields}) for of in (self._shape, self._sizes))
                if not all(_is_size(value) or type(value) in (bool, str) for value in shape) or not all(
                    _is_size(value) for value in sizes
                ):
                    raise ValueError(f"sizes must be whole numbers of at least 1: {text}")
                found[shape] = sizes
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"${self.variable} must name a file that `python -m bench.tune` wrote. Got {name}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return found

    def line(self, shape: Any, sizes: Any, **more: object) -> str:
        """A line of such a file; what else is told with it is not read back."""
        return json.dumps({**shape._asdict(), **sizes._asdict(), **more})


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0
