"""How a checkpoint's authors sample, from generation_config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling(generation_config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of `SamplingParams` that the file has; one whose `do_sample` is false says nothing of it.

    Raises:
        ValueError: One of them is no number.
    """
    if generation_config.get("do_sample") is False:
        return {}
    said = {name: value for name in _NAMES if (value := generation_config.get(name)) is not None}
    for name, value in said.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{folder / 'generation_config.json'} must give a number as `{name}`. Got {value!r}.")
    return said
