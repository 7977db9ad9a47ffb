"""StarCoder2: norms by mean and deviation, an MLP without gate, biases everywhere, and perhaps a window."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models import tensor_names
from jattn_models.config_fields import boolean, positive, refuse, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.layer_pattern import LayerKind
from jattn_models.weights import Path, Source
from jattn_models.windows import WINDOW_FIELDS, one_window

_ACTIVATION = "gelu_pytorch_tanh"


class Starcoder2Config(DecoderConfig):
    """All layers have one window, if any; `use_bias` is of all projections."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Starcoder2Config":
        fields = with_defaults(
            config,
            num_key_value_heads=2,
            hidden_act=_ACTIVATION,
            max_position_embeddings=4096,
            norm_epsilon=1e-5,
            tie_word_embeddings=True,
        )
        refuse(fields, "hidden_act", unless=_ACTIVATION)
        del fields["hidden_act"]
        biased = boolean(fields, "use_bias", default=True)
        return cls(
            **shared_fields(fields | {"rms_norm_eps": positive(fields, "norm_epsilon", float)}, read=WINDOW_FIELDS),
            segments=one_window(fields),
            qkv_bias=biased,
            o_bias=biased,
            mlp_bias=biased,
            gated=False,
            activation=_ACTIVATION,
            layer_norm=True,
        )


class Starcoder2ForCausalLM(Decoder):
    """A StarCoder2 language model."""

    config_class: ClassVar = Starcoder2Config

    @classmethod
    def layer_tensors(cls, config: Starcoder2Config, kind: LayerKind) -> dict[Path, Source]:
        mlp = tensor_names.of_plain_mlp(("mlp",), "mlp", up="c_fc", down="c_proj", biased=config.mlp_bias)
        return tensor_names.of_layer_but_its_mlp(config) | mlp
