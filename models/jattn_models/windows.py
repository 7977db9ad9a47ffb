"""Sliding windows as configurations state them."""

from collections.abc import Callable, Mapping
from typing import Any

from jattn_models.config_fields import boolean, positive, refuse, whole
from jattn_models.layer_pattern import LayerKind, RopeName, Segment, alike, segments
from jattn_models.rope import context_len

WINDOW_FIELDS = ("sliding_window", "layer_types")
QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def used_window(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without `sliding_window` where `use_sliding_window` does not say that it is in use."""
    used = boolean(fields, "use_sliding_window", default=False)
    return {name: value for name, value in fields.items() if name != "sliding_window" or used}


def window_left(fields: Mapping[str, Any]) -> int | None:
    """Keys to the left of a token that `sliding_window`, own key counted, lets it see; None if that is all of them.

    Raises:
        ValueError: The window is no number above 0.
        NotImplementedError: There is one and `use_sliding_window` is false, which the architecture does not read.
    """
    if "sliding_window" not in fields:
        return None
    refuse(fields, "use_sliding_window", unless=True, why=": this architecture always uses its `sliding_window`")
    window = positive(fields, "sliding_window", int)
    return None if window >= context_len(fields) else window - 1


def one_window(fields: Mapping[str, Any], *, sparse: bool = False) -> tuple[Segment, ...]:
    """Layers that all have the window, if there is one.

    Raises:
        NotImplementedError: `layer_types` says otherwise.
    """
    expected = _SLIDING if "sliding_window" in fields else _FULL
    if others := [given for given in fields.get("layer_types", ()) if given != expected]:
        raise NotImplementedError(
            f"`layer_types` must be {expected!r} throughout: this architecture's layers are alike. Got {others[0]!r}."
        )
    return alike(positive(fields, "num_hidden_layers", int), LayerKind(window_left(fields), sparse))


def windows_by_layer(fields: Mapping[str, Any]) -> tuple[Segment, ...]:
    """Layers as `layer_types` lists them; without it, those from `max_window_layers` on have the window.

    Raises:
        ValueError: The list does not fit the layers, or names a window that there is not.
        NotImplementedError: The list names another type.
    """
    num_layers = positive(fields, "num_hidden_layers", int)
    fields = used_window(fields)
    is_sliding = listed(fields, num_layers) if "layer_types" in fields else _from_one_on(fields)
    window = window_left(fields)
    if window is None:
        return alike(num_layers)
    return segments(num_layers, lambda layer: LayerKind(window if is_sliding(layer) else None))


def alternating(
    fields: Mapping[str, Any], period: int, *, sliding_rope: RopeName = "global", sparse: bool = False
) -> tuple[Segment, ...]:
    """Layers as `layer_types` lists them; without it, the last of each `period` sees all keys and the others a window.

    Args:
        sliding_rope: Which rotary embedding layers with the window have.
        sparse: Whether all are.

    Raises:
        ValueError: The list does not fit the layers, or names a window that there is not.
        NotImplementedError: The list names another type.
    """
    num_layers = positive(fields, "num_hidden_layers", int)
    is_sliding = listed(fields, num_layers) if "layer_types" in fields else lambda layer: (layer + 1) % period != 0
    sliding, full = LayerKind(window_left(fields), sparse, rope=sliding_rope), LayerKind(sparse=sparse)
    return segments(num_layers, lambda layer: sliding if is_sliding(layer) else full)


def listed(fields: Mapping[str, Any], num_layers: int) -> Callable[[int], bool]:
    """Whether a layer has the window, as `layer_types` lists them.

    Raises:
        ValueError: The list does not fit the layers, or names a window that there is not.
        NotImplementedError: The list names another type.
    """
    types = fields["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"`layer_types` must be a list of {num_layers} types, one a layer. Got {types!r}.")
    if others := [given for given in types if given not in (_FULL, _SLIDING)]:
        raise NotImplementedError(f"`layer_types` must be of {_FULL!r} and {_SLIDING!r}. Got {others[0]!r}.")
    if _SLIDING in types and "sliding_window" not in fields:
        raise ValueError(f"`layer_types` may have {_SLIDING!r} only with `sliding_window` in use. Got none.")
    return lambda layer: types[layer] == _SLIDING


def _from_one_on(fields: Mapping[str, Any]) -> Callable[[int], bool]:
    first = whole(fields, "max_window_layers")
    return lambda layer: layer >= first
