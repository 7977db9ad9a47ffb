"""Gemma 3: windowed layers with a rotary embedding of their own, norms on both sides of attention and MLP."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import positive, positive_or_none, refuse, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.rope import Rope
from jattn_models.rope_by_layer import rope_by_layer
from jattn_models.windows import WINDOW_FIELDS, alternating

_ACTIVATION = "gelu_pytorch_tanh"


class Gemma3Config(DecoderConfig):
    """Every sixth layer sees all keys; those between have a window and a faster rotary embedding."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Gemma3Config":
        fields = with_defaults(
            config,
            vocab_size=262208,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=131072,
            rms_norm_eps=1e-6,
            sliding_window=4096,
            sliding_window_pattern=6,
            query_pre_attn_scalar=256,
            hidden_activation=_ACTIVATION,
            tie_word_embeddings=True,
        )
        fields.pop("hidden_act", None)  # says nothing here: transformers reads `hidden_activation`
        refuse(fields, "hidden_activation", unless=_ACTIVATION)
        local_theta = fields.get("rope_local_base_freq", 1e4)
        full, local = rope_by_layer(fields, theta=fields.get("rope_theta", 1e6), local_theta=local_theta)
        shared = shared_fields(
            fields | {"rope_parameters": full, "rope_scaling": {}},
            read=(*WINDOW_FIELDS, "attention_bias", "query_pre_attn_scalar", "final_logit_softcapping"),
        )
        return cls(
            **shared,
            segments=alternating(fields, positive(fields, "sliding_window_pattern", int), sliding_rope="local"),
            local_rope=Rope.from_config({"rope_parameters": local}, shared["head_dim"]),
            qk_norm="head",
            attention_scale=positive(fields, "query_pre_attn_scalar", float) ** -0.5,
            activation=_ACTIVATION,
            norms="both",
            norm_offset=1.0,
            embedding_scale=shared["hidden_size"] ** 0.5,
            logit_cap=positive_or_none(fields, "final_logit_softcapping", float),
        )


class Gemma3ForCausalLM(Decoder):
    """A Gemma 3 language model."""

    config_class: ClassVar = Gemma3Config
