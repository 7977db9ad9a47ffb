"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and perhaps a window in some layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.windows import QWEN_DEFAULTS, WINDOW_FIELDS, windows_by_layer


class Qwen2Config(DecoderConfig):
    """The biases need no field; the windows need `use_sliding_window`."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Qwen2Config":
        fields = with_defaults(config, **QWEN_DEFAULTS, num_key_value_heads=32)
        fields.pop("attention_bias", None)  # says nothing here: transformers does not ask
        shared = shared_fields(fields, read=WINDOW_FIELDS)
        return cls(**shared, segments=windows_by_layer(fields), qkv_bias=True)


class Qwen2ForCausalLM(Decoder):
    """A Qwen2 language model."""

    config_class: ClassVar = Qwen2Config
