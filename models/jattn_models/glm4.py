"""GLM-4: norms on both sides of attention and MLP, and a part of each head that stays."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models import tensor_names
from jattn_models.config_fields import positive, with_defaults
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.layer_pattern import LayerKind, alike
from jattn_models.rotary_order import NeighbourTurningDecoder
from jattn_models.weights import Path, Source


class Glm4Config(DecoderConfig):
    """`attention_bias` is of queries, keys and values alone."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Glm4Config":
        fields = with_defaults(
            config,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=131072,
            rms_norm_eps=1.5625e-7,
            partial_rotary_factor=0.5,
            attention_bias=True,
        )
        shared = shared_fields(fields, read=("partial_rotary_factor", "attention_bias"))
        shared["o_bias"] = False
        return cls(**shared, segments=alike(positive(fields, "num_hidden_layers", int)), norms="both")


class Glm4ForCausalLM(NeighbourTurningDecoder):
    """A GLM-4 language model."""

    config_class: ClassVar = Glm4Config

    @classmethod
    def layer_tensors(cls, config: Glm4Config, kind: LayerKind) -> dict[Path, Source]:
        gate_up = (config.intermediate_size,) * 2
        return tensor_names.of_layer(config) | {
            ("attended_norm", "scale"): tensor_names.whole("post_self_attn_layernorm.weight"),
            ("post_attention_norm", "scale"): tensor_names.whole("post_attention_layernorm.weight"),
            ("mlp", "gate_up_proj", "kernel"): tensor_names.split_outputs({"mlp.gate_up_proj.weight": gate_up}),
            ("mlp_norm", "scale"): tensor_names.whole("post_mlp_layernorm.weight"),
        }
