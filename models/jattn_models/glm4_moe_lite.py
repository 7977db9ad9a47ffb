"""GLM-4.7-Flash: DeepSeek-V3's layers under GLM's name."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import positive, with_defaults
from jattn_models.deepseek import DeepseekV3ForCausalLM, biased_fields
from jattn_models.latent_attention import LatentConfig

_LAYER_TYPES = ("dense", "sparse")


class Glm4MoeLiteConfig(LatentConfig):
    """`intermediate_size` is that of dense layers; several shared experts are one of all their hidden units."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Glm4MoeLiteConfig":
        fields = with_defaults(
            {"q_lora_rank": 768} | dict(config),
            max_position_embeddings=202752,
            rms_norm_eps=1e-5,
            first_k_dense_replace=1,
            n_routed_experts=64,
            n_shared_experts=1,
            num_experts_per_tok=4,
            moe_intermediate_size=1536,
            routed_scaling_factor=1.8,
            n_group=1,
            topk_group=1,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
        )
        types = _layer_types(fields)
        is_sparse = None if types is None else lambda layer: types[layer] == "sparse"
        return cls(**biased_fields(fields, is_sparse=is_sparse))


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """A GLM-4.7-Flash language model; the layer behind its last, which drafts tokens, is not read."""

    config_class: ClassVar = Glm4MoeLiteConfig


def _layer_types(fields: Mapping[str, Any]) -> list[str] | None:
    """`mlp_layer_types`, one a layer; None where it is absent."""
    types, count = fields.get("mlp_layer_types"), positive(fields, "num_hidden_layers", int)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != count or not all(each in _LAYER_TYPES for each in types):
        raise ValueError(f"`mlp_layer_types` must be a list of {count} times 'dense' or 'sparse'. Got {types!r}.")
    return types
