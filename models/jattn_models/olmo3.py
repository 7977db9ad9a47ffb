"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotary embedding is not scaled."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.rope import Rope
from jattn_models.rope_by_layer import rope_by_layer
from jattn_models.windows import WINDOW_FIELDS, alternating


class Olmo3Config(DecoderConfig):
    """Every fourth layer sees all keys; `rope_scaling` is of these alone."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Olmo3Config":
        fields = with_defaults(
            config, max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096, rope_theta=5e5
        )
        theta = fields["rope_theta"]
        full, local = rope_by_layer(fields, theta=theta, local_theta=theta)
        shared = shared_fields(
            fields | {"rope_parameters": full, "rope_scaling": {}}, read=(*WINDOW_FIELDS, "attention_bias")
        )
        context = {"max_position_embeddings": shared["context_len"]}
        return cls(
            **shared,
            segments=alternating(fields, 4, sliding_rope="local"),
            local_rope=Rope.from_config({"rope_parameters": local, **context}, shared["head_dim"]),
            norms="after",
            qk_norm="projection",
        )


class Olmo3ForCausalLM(Decoder):
    """An OLMo 3 language model."""

    config_class: ClassVar = Olmo3Config
