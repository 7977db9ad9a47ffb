"""Mistral Small 3.1 and later: Mistral's text model inside a model that sees too."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import refuse
from jattn_models.decoder import Decoder
from jattn_models.mistral import MistralConfig


class Mistral3Config(MistralConfig):
    """Of the text model that `model_type` names."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> MistralConfig:
        refuse(config, "model_type", unless="mistral")
        return MistralConfig.from_dict(config)


class Mistral3ForConditionalGeneration(Decoder):
    """The language model of a Mistral 3."""

    config_class: ClassVar = Mistral3Config
