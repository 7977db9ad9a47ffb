"""The sizes that a server has unless told: many requests at once on a GPU."""

from collections.abc import Mapping
from typing import Any

from jattn import devices

_SIZES = {"max_num_seqs": 256, "prefill_tokens": 2048}  # of a GPU; on a CPU compiling so many steps takes minutes


def sizes_for_device(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs; of the sizes that a server leaves open those that suit the device."""
    defaults = {} if devices.started_devices()[0][0].platform == "cpu" else _SIZES
    given = {name: value for name, value in knobs.items() if name not in _SIZES or value is not None}
    return defaults | given
