"""Mixtral: Mistral whose every MLP is a mixture of experts."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models import tensor_names
from jattn_models.config_fields import positive, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.experts import Experts
from jattn_models.layer_pattern import LayerKind
from jattn_models.routing_fields import read_routing
from jattn_models.weights import Path, Source
from jattn_models.windows import WINDOW_FIELDS, one_window


class MixtralConfig(DecoderConfig):
    """`intermediate_size` is one expert's; a token's weights are a softmax over its chosen experts."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "MixtralConfig":
        fields = {"rope_theta": 1e6} | with_defaults(
            config,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            num_local_experts=8,
            num_experts_per_tok=2,
        )
        experts = Experts(
            routing=read_routing(fields, "num_local_experts", normalised=True),
            intermediate_size=positive(fields, "intermediate_size", int),
        )
        shared = shared_fields(fields, read=WINDOW_FIELDS)
        return cls(**shared, segments=one_window(fields, sparse=True), experts=experts)


class MixtralForCausalLM(Decoder):
    """A Mixtral language model."""

    config_class: ClassVar = MixtralConfig

    @classmethod
    def layer_tensors(cls, config: MixtralConfig, kind: LayerKind) -> dict[Path, Source]:
        mixture = tensor_names.of_mixture(config.intermediate_size, "block_sparse_moe", gate="w1", up="w3", down="w2")
        return tensor_names.of_layer(config) | mixture
