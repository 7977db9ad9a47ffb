"""Gemma 3: windowed layers with a rotary embedding of their own, norms on both sides of attention and MLP."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float, Int

from jattn.parallel import Parallel
from jattn_models import tensor_names
from jattn_models.attention import Pass
from jattn_models.config_fields import positive, refuse, with_defaults
from jattn_models.decoder import Decoder, DecoderLayer
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.layer_pattern import LayerKind, Segment, segments
from jattn_models.layers import RMSNorm
from jattn_models.rope import Rope
from jattn_models.weights import Path, Source
from jattn_models.windows import WINDOW_FIELDS, listed, window_left

_ACTIVATION = "gelu_pytorch_tanh"


class Gemma3Config(DecoderConfig):
    """Every sixth layer sees all keys; those between have a window and a faster rotary embedding."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Gemma3Config":
        fields = with_defaults(
            config,
            vocab_size=262208,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=131072,
            rms_norm_eps=1e-6,
            sliding_window=4096,
            sliding_window_pattern=6,
            query_pre_attn_scalar=256,
            hidden_activation=_ACTIVATION,
            tie_word_embeddings=True,
        )
        fields.pop("hidden_act", None)  # says nothing here: transformers reads `hidden_activation`
        refuse(fields, "hidden_activation", unless=_ACTIVATION)
        full, local = _rope_parameters(fields)
        shared = shared_fields(
            fields | {"rope_parameters": full, "rope_scaling": {}},
            read=(*WINDOW_FIELDS, "attention_bias", "query_pre_attn_scalar", "final_logit_softcapping"),
        )
        return cls(
            **shared,
            segments=_segments(fields),
            local_rope=Rope.from_config({"rope_parameters": local}, shared["head_dim"]),
            qk_norm="head",
            attention_scale=positive(fields, "query_pre_attn_scalar", float) ** -0.5,
            activation=_ACTIVATION,
            norm_offset=1.0,
            embedding_scale=shared["hidden_size"] ** 0.5,
            logit_cap=positive(fields, "final_logit_softcapping", float)
            if "final_logit_softcapping" in fields
            else None,
        )


class Gemma3Layer(DecoderLayer):
    """A layer whose attention and MLP pass a norm after them too."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, *, dtype: Any, rngs: nnx.Rngs, parallel: Parallel):
        super().__init__(config, kind, dtype=dtype, rngs=rngs, parallel=parallel)
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, offset=config.norm_offset, dtype=dtype)
        self.attended_norm = norm(config.hidden_size)
        self.mlp_norm = norm(config.hidden_size)

    def __call__(self, hidden: Float[Array, "T D"], layer_index: Int[Array, ""], this_pass: Pass, pool: Any):
        attended, pool = self.attention(self.input_norm(hidden), layer_index, this_pass, pool)
        hidden = hidden + self.attended_norm(attended)
        return hidden + self.mlp_norm(self.mlp(self.post_attention_norm(hidden))), pool


class Gemma3ForCausalLM(Decoder):
    """A Gemma 3 language model."""

    config_class: ClassVar = Gemma3Config
    layer_class: ClassVar = Gemma3Layer

    @classmethod
    def layer_tensors(cls, config: Gemma3Config, kind: LayerKind) -> dict[Path, Source]:
        return tensor_names.of_layer(config) | {
            ("attended_norm", "scale"): tensor_names.whole("post_attention_layernorm.weight"),
            ("post_attention_norm", "scale"): tensor_names.whole("pre_feedforward_layernorm.weight"),
            ("mlp_norm", "scale"): tensor_names.whole("post_feedforward_layernorm.weight"),
        }


def _segments(fields: Mapping[str, Any]) -> tuple[Segment, ...]:
    """Layers as `layer_types` lists them; without it, one of each `sliding_window_pattern` sees all keys."""
    num_layers = positive(fields, "num_hidden_layers", int)
    pattern = positive(fields, "sliding_window_pattern", int)
    is_sliding = listed(fields, num_layers) if "layer_types" in fields else lambda layer: (layer + 1) % pattern != 0
    sliding = LayerKind(window_left(fields), rope="local")
    return segments(num_layers, lambda layer: sliding if is_sliding(layer) else LayerKind())


def _rope_parameters(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of full and of sliding layers: `rope_parameters` has both, older files have a field for each fact."""
    both = fields.get("rope_parameters", {})
    if (
        not isinstance(both, Mapping)
        or not both.keys() <= {"full_attention", "sliding_attention"}
        or not all(isinstance(part, Mapping | None) for part in both.values())
    ):
        raise ValueError(f"`rope_parameters` must be an object with one for each type of layer. Got {both!r}.")
    scaling = fields.get("rope_scaling", {})
    if not isinstance(scaling, Mapping):
        raise ValueError(f"`rope_scaling` must be an object. Got {scaling!r}.")
    theta, local_theta = fields.get("rope_theta", 1e6), fields.get("rope_local_base_freq", 1e4)
    full = {"rope_theta": theta} | dict(both.get("full_attention") or {}) | dict(scaling)
    return full, {"rope_theta": local_theta} | dict(both.get("sliding_attention") or {})
