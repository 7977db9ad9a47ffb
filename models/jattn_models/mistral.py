"""Mistral: Llama with a sliding window."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.windows import WINDOW_FIELDS, one_window


class MistralConfig(DecoderConfig):
    """All layers have one window, or none where `sliding_window` is null."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "MistralConfig":
        fields = with_mistral_defaults(config)
        return cls(**shared_fields(fields, read=WINDOW_FIELDS), segments=one_window(fields))


def with_mistral_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration with what transformers' has where it says nothing."""
    return with_defaults(
        config, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-6, sliding_window=4096
    )


class MistralForCausalLM(Decoder):
    """A Mistral language model."""

    config_class: ClassVar = MistralConfig
