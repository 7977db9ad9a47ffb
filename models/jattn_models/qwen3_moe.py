"""Qwen3-MoE: Qwen3 with a mixture of experts in all layers but those that its configuration leaves dense."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models import tensor_names
from jattn_models.config_fields import boolean, positive, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.experts import Experts
from jattn_models.layer_pattern import LayerKind
from jattn_models.routing_fields import read_routing
from jattn_models.sparse_layers import sparse_by_step
from jattn_models.weights import Path, Source
from jattn_models.windows import QWEN_DEFAULTS, WINDOW_FIELDS, one_window, used_window


class Qwen3MoeConfig(DecoderConfig):
    """All layers have one window, or none; `intermediate_size` is that of dense layers."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Qwen3MoeConfig":
        fields = with_defaults(
            config,
            **QWEN_DEFAULTS,
            num_key_value_heads=4,
            num_experts_per_tok=8,
            num_local_experts=128,
            moe_intermediate_size=768,
            decoder_sparse_step=1,
        )
        fields = {"num_experts": fields.get("num_local_experts")} | used_window(fields)  # transformers 5 renamed it
        experts = Experts(
            routing=read_routing(fields, "num_experts", normalised=boolean(fields, "norm_topk_prob", default=False)),
            intermediate_size=positive(fields, "moe_intermediate_size", int),
        )
        shared = shared_fields(fields, read=(*WINDOW_FIELDS, "attention_bias"))
        return cls(**shared, segments=sparse_by_step(fields, one_window(fields)), qk_norm="head", experts=experts)


class Qwen3MoeForCausalLM(Decoder):
    """A Qwen3-MoE language model."""

    config_class: ClassVar = Qwen3MoeConfig

    @classmethod
    def layer_tensors(cls, config: Qwen3MoeConfig, kind: LayerKind) -> dict[Path, Source]:
        tensors = tensor_names.of_layer(config)
        if not kind.sparse:
            return tensors
        assert config.experts is not None
        units = config.experts.intermediate_size
        return tensors | tensor_names.of_mixture(units)
