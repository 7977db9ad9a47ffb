"""OLMo 2: norms after attention and MLP, and of queries and keys over all heads together."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import positive, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.layer_pattern import alike


class Olmo2Config(DecoderConfig):
    """All layers see all keys."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Olmo2Config":
        fields = with_defaults(config, max_position_embeddings=2048, rms_norm_eps=1e-5)
        shared = shared_fields(fields, read=("attention_bias",))
        layers = alike(positive(fields, "num_hidden_layers", int))
        return cls(**shared, segments=layers, norms="after", qk_norm="projection")


class Olmo2ForCausalLM(Decoder):
    """An OLMo 2 language model."""

    config_class: ClassVar = Olmo2Config
