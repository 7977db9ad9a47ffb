"""LlamaConfig: the facts of a Llama model, read from its config.json."""

from collections.abc import Mapping
from typing import Any

from jattn_models.config_fields import positive, with_defaults
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.layer_pattern import alike


class LlamaConfig(DecoderConfig):
    """A Llama 3.x: what all families share, and no more."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        fields = with_defaults(config, max_position_embeddings=2048, rms_norm_eps=1e-6)
        shared = shared_fields(fields, read=("attention_bias", "mlp_bias"))
        return cls(**shared, segments=alike(positive(fields, "num_hidden_layers", int)))
