"""Gemma 2: every other layer has a window, logits of attention and of tokens have soft caps, norms on both sides."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import positive, positive_or_none, refuse, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.windows import WINDOW_FIELDS, alternating

_ACTIVATION = "gelu_pytorch_tanh"
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


class Gemma2Config(DecoderConfig):
    """The first of two layers has the window, the second sees all keys."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Gemma2Config":
        fields = with_defaults(
            config,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=8192,
            rms_norm_eps=1e-6,
            sliding_window=4096,
            query_pre_attn_scalar=256,
            hidden_activation=_ACTIVATION,
            tie_word_embeddings=True,
            **_CAPS,
        )
        fields.pop("hidden_act", None)  # says nothing here: transformers reads `hidden_activation`
        refuse(fields, "hidden_activation", unless=_ACTIVATION)
        shared = shared_fields(fields, read=(*WINDOW_FIELDS, *_CAPS, "attention_bias", "query_pre_attn_scalar"))
        return cls(
            **shared,
            segments=alternating(fields, 2),
            attention_scale=positive(fields, "query_pre_attn_scalar", float) ** -0.5,
            attention_cap=positive_or_none(fields, "attn_logit_softcapping", float),
            activation=_ACTIVATION,
            norms="both",
            norm_offset=1.0,
            embedding_scale=shared["hidden_size"] ** 0.5,
            logit_cap=positive_or_none(fields, "final_logit_softcapping", float),
        )


class Gemma2ForCausalLM(Decoder):
    """A Gemma 2 language model."""

    config_class: ClassVar = Gemma2Config
