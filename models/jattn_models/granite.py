"""Granite 3: Llama with factors on embedded tokens, logits of attention and of tokens, and what layers add."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import positive, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.layer_pattern import alike

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


class GraniteConfig(DecoderConfig):
    """Absent factors are 1, that of attention too."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "GraniteConfig":
        fields = with_defaults(config, **dict.fromkeys(_FACTORS, 1.0), max_position_embeddings=2048, rms_norm_eps=1e-6)
        return cls(
            **shared_fields(fields, read=(*_FACTORS, "attention_bias", "mlp_bias")),
            segments=alike(positive(fields, "num_hidden_layers", int)),
            attention_scale=positive(fields, "attention_multiplier", float),
            embedding_scale=positive(fields, "embedding_multiplier", float),
            residual_scale=positive(fields, "residual_multiplier", float),
            logit_scale=1.0 / positive(fields, "logits_scaling", float),
        )


class GraniteForCausalLM(Decoder):
    """A Granite language model."""

    config_class: ClassVar = GraniteConfig
