"""Qwen3: Llama with a norm on each head's query and key, and perhaps a window in some layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.windows import QWEN_DEFAULTS, WINDOW_FIELDS, windows_by_layer


class Qwen3Config(DecoderConfig):
    """The norms need no field; the windows need `use_sliding_window`."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Qwen3Config":
        fields = with_defaults(config, **QWEN_DEFAULTS, num_key_value_heads=32, head_dim=128)
        shared = shared_fields(fields, read=(*WINDOW_FIELDS, "attention_bias"))
        return cls(**shared, segments=windows_by_layer(fields), qk_norm="head")


class Qwen3ForCausalLM(Decoder):
    """A Qwen3 language model."""

    config_class: ClassVar = Qwen3Config
