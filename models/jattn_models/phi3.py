"""Phi-3 and Phi-4-mini: Llama whose checkpoints hold fused projections, with LongRoPE and perhaps a window."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models import tensor_names
from jattn_models.config_fields import with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.layer_pattern import LayerKind
from jattn_models.weights import Path, Source
from jattn_models.windows import WINDOW_FIELDS, one_window


class Phi3Config(DecoderConfig):
    """All layers have one window, if any; a part of each head may stay unturned."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Phi3Config":
        fields = with_defaults(
            config, max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5
        )
        shared = shared_fields(fields, read=(*WINDOW_FIELDS, "partial_rotary_factor"))
        return cls(**shared, segments=one_window(fields))


class Phi3ForCausalLM(Decoder):
    """A Phi-3 language model."""

    config_class: ClassVar = Phi3Config

    @classmethod
    def layer_tensors(cls, config: Phi3Config, kind: LayerKind) -> dict[Path, Source]:
        q, kv = (heads * config.head_dim for heads in (config.num_q_heads, config.num_kv_heads))
        qkv, gate_up = (q, kv, kv), (config.intermediate_size,) * 2
        return tensor_names.of_layer(config) | {
            ("attention", "qkv_proj", "kernel"): tensor_names.split_outputs(
                {"self_attn.qkv_proj.weight": qkv}, unit=config.head_dim
            ),
            ("mlp", "gate_up_proj", "kernel"): tensor_names.split_outputs({"mlp.gate_up_proj.weight": gate_up}),
        }
