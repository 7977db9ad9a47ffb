"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases behind a biased router."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models import tensor_names
from jattn_models.config_fields import positive, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.experts import ClampedSwiGLU, Experts
from jattn_models.layer_pattern import LayerKind
from jattn_models.routing_fields import read_routing
from jattn_models.weights import Path, Source
from jattn_models.windows import WINDOW_FIELDS, alternating

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssConfig(DecoderConfig):
    """`intermediate_size` is one expert's; the first of two layers has the window, the second sees all keys."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "GptOssConfig":
        fields = with_defaults(
            config,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            sliding_window=128,
            attention_bias=True,
            rope_theta=150000.0,
            num_local_experts=128,
            num_experts_per_tok=4,
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
        )
        if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
            fields["rope_parameters"] = _YARN
        experts = Experts(
            routing=read_routing(fields, "num_local_experts", scoring="softmax_of_chosen"),
            intermediate_size=positive(fields, "intermediate_size", int),
            activation=ClampedSwiGLU(
                limit=positive(fields, "swiglu_limit", float), alpha=positive(fields, "swiglu_alpha", float)
            ),
            biased=True,
            router_biased=True,
        )
        shared = shared_fields(fields, read=(*WINDOW_FIELDS, "attention_bias"))
        return cls(**shared, segments=alternating(fields, 2, sparse=True), sinks=True, experts=experts)


class GptOssForCausalLM(Decoder):
    """A gpt-oss language model."""

    config_class: ClassVar = GptOssConfig

    @classmethod
    def layer_tensors(cls, config: GptOssConfig, kind: LayerKind) -> dict[Path, Source]:
        prefix, blocks = "mlp.experts.gate_up_proj", (config.intermediate_size,) * 2
        gate_up, gate_up_bias = (
            tensor_names.split_outputs({name: blocks}, alternating=True) for name in (prefix, f"{prefix}_bias")
        )
        return tensor_names.of_layer_but_its_mlp(config) | {
            ("attention", "sinks"): tensor_names.split_outputs("self_attn.sinks"),
            ("mlp", "router", "kernel"): tensor_names.whole("mlp.router.weight"),
            ("mlp", "router", "bias"): tensor_names.whole("mlp.router.bias"),
            ("mlp", "gate_up_proj", "kernel"): gate_up,
            ("mlp", "gate_up_proj", "bias"): gate_up_bias,
            ("mlp", "down_proj", "kernel"): tensor_names.split_inputs("mlp.experts.down_proj"),
            ("mlp", "down_proj", "bias"): tensor_names.whole("mlp.experts.down_proj_bias"),
        }
