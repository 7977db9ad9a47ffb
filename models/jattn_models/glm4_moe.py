"""GLM-4.5: dense layers first, then mixtures whose router chooses by biased sigmoids, beside a shared expert."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jattn_models import tensor_names
from jattn_models.config_fields import boolean, positive, whole, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig, shared_fields
from jattn_models.experts import Experts
from jattn_models.layer_pattern import LayerKind, segments
from jattn_models.routing_fields import read_routing
from jattn_models.weights import Path, Source

_READ = ("partial_rotary_factor", "attention_bias", "routed_scaling_factor", "n_group", "topk_group")


class Glm4MoeConfig(DecoderConfig):
    """`intermediate_size` is that of dense layers; several shared experts are one of all their hidden units."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Glm4MoeConfig":
        fields = with_defaults(
            config,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        )
        units, first_sparse = positive(fields, "moe_intermediate_size", int), whole(fields, "first_k_dense_replace")
        routing = read_routing(
            fields,
            "n_routed_experts",
            scoring="sigmoid",
            normalised=boolean(fields, "norm_topk_prob", default=True),
            scaling_factor=positive(fields, "routed_scaling_factor", float),
            num_groups=positive(fields, "n_group", int),
            groups_per_token=positive(fields, "topk_group", int),
            group_score="two_best",
        )
        shared: dict[str, Any] = shared_fields(fields, read=_READ) | {"o_bias": False}
        return cls(
            **shared,
            segments=segments(
                positive(fields, "num_hidden_layers", int), lambda layer: LayerKind(sparse=layer >= first_sparse)
            ),
            qk_norm="head" if boolean(fields, "use_qk_norm", default=False) else None,
            experts=Experts(
                routing=routing,
                intermediate_size=units,
                choice_biased=True,
                shared_size=units * positive(fields, "n_shared_experts", int),
            ),
        )


class Glm4MoeForCausalLM(Decoder):
    """A GLM-4.5 language model; the layer behind its last, which drafts tokens, is not read."""

    config_class: ClassVar = Glm4MoeConfig

    @classmethod
    def layer_tensors(cls, config: Glm4MoeConfig, kind: LayerKind) -> dict[Path, Source]:
        tensors = tensor_names.of_layer(config)
        if not kind.sparse:
            return tensors
        assert config.experts is not None
        return {
            **tensors,
            **tensor_names.of_mixture_beside_shared(config.experts, "mlp.shared_experts"),
            ("mlp", "router", "choice_bias"): tensor_names.whole("mlp.gate.e_score_correction_bias"),
        }

    @classmethod
    def unread_tensors(cls, config: Glm4MoeConfig) -> tuple[str, ...]:
        return (*super().unread_tensors(config), f"model.layers.{config.num_layers}.")
