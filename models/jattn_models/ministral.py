"""Ministral: Mistral whose layers are windowed as listed; Ministral 3: with queries that grow over long texts."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import positive, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.layer_pattern import LayerKind, Segment, segments
from jattn_models.mistral import with_mistral_defaults
from jattn_models.temperature import Temperature
from jattn_models.windows import WINDOW_FIELDS, listed, one_window, window_left

_ROPE = ("rope_parameters", "rope_scaling")
# What the object of these models has beside what its `rope_type` reads.
_BETA, _BESIDE = "llama_4_scaling_beta", ("llama_4_scaling_beta", "max_position_embeddings")
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _BETA: 0.1,
}


class MinistralConfig(DecoderConfig):
    """Layers as `layer_types` lists them; without it all have the window, if there is one."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "MinistralConfig":
        fields = with_mistral_defaults(config)
        return cls(**shared_fields(fields, read=WINDOW_FIELDS), segments=_segments(fields))


class MinistralForCausalLM(Decoder):
    """A Ministral language model."""

    config_class: ClassVar = MinistralConfig


def _segments(fields: Mapping[str, Any]) -> tuple[Segment, ...]:
    if "layer_types" not in fields:
        return one_window(fields)
    num_layers, window = positive(fields, "num_hidden_layers", int), window_left(fields)
    is_sliding = listed(fields, num_layers)
    return segments(num_layers, lambda layer: LayerKind(window if is_sliding(layer) else None))


class Ministral3Config(DecoderConfig):
    """All layers turn, and their queries grow with every `original_max_position_embeddings` tokens."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Ministral3Config":
        fields = with_defaults(
            config, num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5
        )
        rope = next((fields[name] for name in _ROPE if fields.get(name)), _YARN)
        if not isinstance(rope, Mapping):
            raise ValueError(f"`rope_parameters` or `rope_scaling` must be an object. Got {rope!r}.")
        fields["rope_scaling"] = {}
        fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in _BESIDE}
        return cls(
            **shared_fields(fields, read=WINDOW_FIELDS), segments=one_window(fields), temperature=_temperature(rope)
        )


class Ministral3ForCausalLM(Decoder):
    """A Ministral 3 language model."""

    config_class: ClassVar = Ministral3Config


def _temperature(rope: Mapping[str, Any]) -> Temperature | None:
    if rope.get(_BETA) is None:
        return None
    floor = positive(rope, "original_max_position_embeddings", float)
    return Temperature(positive(rope, _BETA, float), floor, first=0.0, of_turning=True)
