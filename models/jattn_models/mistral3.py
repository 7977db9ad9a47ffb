"""Mistral Small 3.1 and later, and Ministral 3: the text model inside a model that sees too."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig
from jattn_models.ministral import Ministral3Config
from jattn_models.mistral import MistralConfig

_TEXT_MODELS: dict[str, type[DecoderConfig]] = {"mistral": MistralConfig, "ministral3": Ministral3Config}


class Mistral3Config(DecoderConfig):
    """Of the text model that `model_type` names."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DecoderConfig:
        name = config.get("model_type", "mistral")
        if name not in _TEXT_MODELS:
            raise NotImplementedError(
                f"`model_type` of the text model must be one of {', '.join(_TEXT_MODELS)}. Got {name!r}."
            )
        return _TEXT_MODELS[name].from_dict(config)


class Mistral3ForConditionalGeneration(Decoder):
    """The language model of a Mistral 3."""

    config_class: ClassVar = Mistral3Config
