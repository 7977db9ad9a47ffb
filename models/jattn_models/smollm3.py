"""SmolLM3: Llama whose every fourth layer does not turn, and perhaps has a window."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models.config_fields import positive, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.layer_pattern import LayerKind, Segment, segments
from jattn_models.turning_layers import turning
from jattn_models.windows import WINDOW_FIELDS, listed, used_window, window_left


class SmolLM3Config(DecoderConfig):
    """The window needs `use_sliding_window`."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "SmolLM3Config":
        fields = with_defaults(
            config,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
            rope_theta=2e6,
            no_rope_layer_interval=4,
            tie_word_embeddings=True,
        )
        read = (*WINDOW_FIELDS, "no_rope_layers", "attention_bias", "mlp_bias")
        return cls(**shared_fields(fields, read=read), segments=_segments(used_window(fields)))


class SmolLM3ForCausalLM(Decoder):
    """A SmolLM3 language model."""

    config_class: ClassVar = SmolLM3Config


def _segments(fields: Mapping[str, Any]) -> tuple[Segment, ...]:
    """Layers that do not turn have the window, if there is one, unless `layer_types` says otherwise."""
    num_layers, window = positive(fields, "num_hidden_layers", int), window_left(fields)
    turns = turning(fields, num_layers)
    is_sliding = listed(fields, num_layers) if "layer_types" in fields else lambda layer: not turns(layer)

    def kind(layer: int) -> LayerKind:
        return LayerKind(window if is_sliding(layer) else None, rope="global" if turns(layer) else None)

    return segments(num_layers, kind)
