"""OLMoE: a mixture of experts in every layer, and a norm of queries and keys over all heads together."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models import tensor_names
from jattn_models.config_fields import boolean, positive, positive_or_none, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.experts import Experts
from jattn_models.layer_pattern import LayerKind, alike
from jattn_models.routing_fields import read_routing
from jattn_models.weights import Path, Source


class OlmoeConfig(DecoderConfig):
    """`intermediate_size` is one expert's."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "OlmoeConfig":
        fields = with_defaults(
            config, max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8
        )
        experts = Experts(
            routing=read_routing(fields, "num_experts", normalised=boolean(fields, "norm_topk_prob", default=False)),
            intermediate_size=positive(fields, "intermediate_size", int),
        )
        return cls(
            **shared_fields(fields, read=("clip_qkv", "attention_bias")),
            segments=alike(positive(fields, "num_hidden_layers", int), LayerKind(sparse=True)),
            qk_norm="projection",
            qkv_clip=positive_or_none(fields, "clip_qkv", float),
            experts=experts,
        )


class OlmoeForCausalLM(Decoder):
    """An OLMoE language model."""

    config_class: ClassVar = OlmoeConfig

    @classmethod
    def layer_tensors(cls, config: OlmoeConfig, kind: LayerKind) -> dict[Path, Source]:
        return tensor_names.of_layer(config) | tensor_names.of_mixture(config.intermediate_size)
