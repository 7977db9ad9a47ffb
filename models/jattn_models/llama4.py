"""Llama 4, its text model: chunked layers that turn, full layers that do not, and a mixture with a shared expert."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jattn_models import tensor_names
from jattn_models.config_fields import boolean, positive, refuse, with_defaults
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.experts import Experts
from jattn_models.layer_pattern import LayerKind, Segment, segments
from jattn_models.rope import context_len
from jattn_models.rotary_order import NeighbourTurningDecoder
from jattn_models.routing_fields import read_routing
from jattn_models.temperature import Temperature
from jattn_models.turning_layers import turning
from jattn_models.weights import Path, Source

_READ = (
    "attention_bias",
    "attention_chunk_size",
    "layer_types",
    "no_rope_layers",
    "attn_temperature_tuning",
    "scoring_func",
)
_FULL, _CHUNKED = "full_attention", "chunked_attention"


class Llama4Config(DecoderConfig):
    """`intermediate_size` is that of dense layers, `intermediate_size_mlp` in config.json."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Llama4Config":
        fields = {"rope_theta": 5e5} | with_defaults(
            config,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            intermediate_size=8192,
            intermediate_size_mlp=16384,
            num_experts_per_tok=1,
            num_local_experts=16,
            interleave_moe_layer_step=1,
            no_rope_layer_interval=4,
            attention_chunk_size=8192,
            floor_scale=8192,
            attn_scale=0.1,
        )
        units = positive(fields, "intermediate_size", int)
        refuse(fields, "scoring_func", unless="sigmoid")
        shared = shared_fields(
            fields | {"intermediate_size": positive(fields, "intermediate_size_mlp", int)}, read=_READ
        )
        if shared["rope"].amplitude != 1.0:  # the norm of queries and keys stands before they turn here, after it there
            raise NotImplementedError(
                "`rope_type` must leave amplitudes alone in this architecture. Got an amplitude of "
                f"{shared['rope'].amplitude}."
            )
        temperature = Temperature(positive(fields, "attn_scale", float), positive(fields, "floor_scale", float))
        return cls(
            **shared,
            segments=_segments(fields),
            qk_norm="unit" if boolean(fields, "use_qk_norm", default=True) else None,
            temperature=temperature if _is_tuned(fields) else None,
            experts=Experts(
                routing=read_routing(fields, "num_local_experts", scoring="sigmoid"),
                intermediate_size=units,
                weighs_inputs=True,
                shared_size=units,
            ),
        )


class Llama4ForCausalLM(NeighbourTurningDecoder):
    """A Llama 4 language model."""

    config_class: ClassVar = Llama4Config

    @classmethod
    def layer_tensors(cls, config: Llama4Config, kind: LayerKind) -> dict[Path, Source]:
        tensors = tensor_names.of_layer(config)
        if not kind.sparse:
            return tensors | tensor_names.of_gated_mlp(("mlp",), "feed_forward", config.intermediate_size)
        assert config.experts is not None
        assert config.experts.shared_size is not None
        gate_up = (config.experts.intermediate_size,) * 2
        shared = tensor_names.of_gated_mlp(("mlp", "shared"), "feed_forward.shared_expert", config.experts.shared_size)
        return {
            **tensors,
            **shared,
            ("mlp", "router", "kernel"): tensor_names.whole("feed_forward.router.weight"),
            ("mlp", "gate_up_proj", "kernel"): tensor_names.split_outputs(
                {"feed_forward.experts.gate_up_proj": gate_up}
            ),
            ("mlp", "down_proj", "kernel"): tensor_names.split_inputs("feed_forward.experts.down_proj"),
        }


def _is_tuned(fields: Mapping[str, Any]) -> bool:
    """Whether `attn_temperature_tuning` is in use: true, or a number as in Scout's file, of which 0 alone is false."""
    if isinstance(given := fields.get("attn_temperature_tuning"), int):
        return given != 0
    return boolean(fields, "attn_temperature_tuning", default=True)


def _segments(fields: Mapping[str, Any]) -> tuple[Segment, ...]:
    """Layers that turn are chunked and the others full, unless `layer_types` says otherwise."""
    num_layers = positive(fields, "num_hidden_layers", int)
    chunk_size = positive(fields, "attention_chunk_size", int) if "attention_chunk_size" in fields else None
    if chunk_size is not None and chunk_size >= context_len(fields):
        chunk_size = None
    turns, is_sparse = turning(fields, num_layers), _is_sparse(fields)
    is_chunked = _is_chunked(fields, num_layers) if "layer_types" in fields else turns

    def kind(layer: int) -> LayerKind:
        return LayerKind(
            sparse=is_sparse(layer),
            chunk_size=chunk_size if is_chunked(layer) else None,
            rope="global" if turns(layer) else None,
        )

    return segments(num_layers, kind)


def _is_chunked(fields: Mapping[str, Any], num_layers: int) -> Callable[[int], bool]:
    types = fields["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"`layer_types` must be a list of {num_layers} types, one a layer. Got {types!r}.")
    if others := [given for given in types if given not in (_FULL, _CHUNKED)]:
        raise NotImplementedError(f"`layer_types` must be of {_FULL!r} and {_CHUNKED!r}. Got {others[0]!r}.")
    return lambda layer: types[layer] == _CHUNKED


def _is_sparse(fields: Mapping[str, Any]) -> Callable[[int], bool]:
    """Layers that `moe_layers` lists; without it, one of each `interleave_moe_layer_step`."""
    step, given = positive(fields, "interleave_moe_layer_step", int), fields.get("moe_layers")
    if given is not None and not (isinstance(given, list) and all(isinstance(layer, int) for layer in given)):
        raise ValueError(f"`moe_layers` must be a list of layers' numbers. Got {given!r}.")
    return lambda layer: (layer + 1) % step == 0 if given is None else layer in given
