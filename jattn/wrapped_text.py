"""A text model inside a model that sees too: what config.json says of it, and its tensors by names of its own."""

from collections.abc import Iterable, Mapping
from typing import Any

# Said once, of the whole model; there they count.
_OUTER = ("architectures", "eos_token_id", "quantization_config", "tie_word_embeddings")
_HEAD = "lm_head.weight"
# How the text model's names begin, as transformers wrote them before 4.52 and since, and how they do alone.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
# What sees, and what brings that into the text model.
_VISION = ("vision_tower.", "vision_model.", "multi_modal_projector.")
_UNREAD = (*_VISION, *(f"model.{prefix}" for prefix in _VISION))


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a model with a text model inside."""
    return isinstance(config.get("text_config"), Mapping)


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """For each tensor of the text model its name alone, and the one that it is stored by; no tensor of what sees."""
    return {_text_name(name): name for name in stored if not name.startswith(_UNREAD)}


def text_config(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The text model's configuration, as its own config.json would be.

    Where neither it nor the wrapper says whether the embedding is also the output projection, the tensors do: the
    defaults are not the same in all versions of transformers.

    Args:
        names: The text model's tensors.
    """
    outer = {name: value for name in _OUTER if (value := config.get(name)) is not None}
    text = {"tie_word_embeddings": None, **config["text_config"], **outer}
    if text["tie_word_embeddings"] is None:
        text["tie_word_embeddings"] = _HEAD not in names
    return text


def _text_name(name: str) -> str:
    for prefix, alone in _PREFIXES.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name
