"""Qwen2-MoE: Qwen2 with a mixture of experts and a gated shared expert in all layers but those left dense."""

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
from jattn_models.windows import QWEN_DEFAULTS, WINDOW_FIELDS, windows_by_layer


class Qwen2MoeConfig(DecoderConfig):
    """`intermediate_size` is that of dense layers; windows need `use_sliding_window` and `layer_types`."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Qwen2MoeConfig":
        fields = with_defaults(
            config,
            **QWEN_DEFAULTS,
            num_key_value_heads=16,
            num_experts_per_tok=4,
            num_experts=60,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
        )
        fields.pop("attention_bias", None)  # says nothing here: transformers reads `qkv_bias`
        if boolean(fields, "use_sliding_window", default=False) and "layer_types" not in fields:
            # transformers' versions do not agree on what `max_window_layers` then says
            raise NotImplementedError("`use_sliding_window` must be false where there are no `layer_types`. Got true.")
        experts = Experts(
            routing=read_routing(fields, "num_experts", normalised=boolean(fields, "norm_topk_prob", default=False)),
            intermediate_size=positive(fields, "moe_intermediate_size", int),
            shared_size=positive(fields, "shared_expert_intermediate_size", int),
            shared_gated=True,
        )
        return cls(
            **shared_fields(fields, read=WINDOW_FIELDS),
            segments=sparse_by_step(fields, windows_by_layer(fields)),
            qkv_bias=boolean(fields, "qkv_bias", default=True),
            experts=experts,
        )


class Qwen2MoeForCausalLM(Decoder):
    """A Qwen2-MoE language model."""

    config_class: ClassVar = Qwen2MoeConfig

    @classmethod
    def layer_tensors(cls, config: Qwen2MoeConfig, kind: LayerKind) -> dict[Path, Source]:
        tensors = tensor_names.of_layer(config)
        if not kind.sparse:
            return tensors
        assert config.experts is not None
        assert config.experts.shared_size is not None
        return {
            **tensors,
            **tensor_names.of_mixture(config.experts.intermediate_size),
            **tensor_names.of_gated_mlp(("mlp", "shared"), "mlp.shared_expert", config.experts.shared_size),
            ("mlp", "shared_gate", "kernel"): tensor_names.whole("mlp.shared_expert_gate.weight"),
        }
