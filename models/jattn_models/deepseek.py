"""DeepSeek-V2 and V3: latent attention, dense layers first, then mixtures with shared experts."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jattn_models import tensor_names
from jattn_models.config_fields import boolean, positive, refuse, whole, with_defaults
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import shared_fields
from jattn_models.decoder_layer import DecoderLayer
from jattn_models.experts import Experts
from jattn_models.latent_attention import LatentAttention, LatentConfig
from jattn_models.layer_pattern import LayerKind, segments
from jattn_models.routing_fields import read_routing
from jattn_models.weights import OfHeads, Path, Source

_READ = ("routed_scaling_factor", "n_group", "topk_group", "scoring_func")


class DeepseekV2Config(LatentConfig):
    """`intermediate_size` is that of dense layers; several shared experts are one of all their hidden units."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DeepseekV2Config":
        fields = with_defaults(
            {"q_lora_rank": 1536} | dict(config),
            max_position_embeddings=2048,
            rms_norm_eps=1e-6,
            first_k_dense_replace=0,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1407,
            topk_method="greedy",
            **_WIDTHS,
        )
        refuse(fields, "scoring_func", unless="softmax")
        refuse(fields, "norm_topk_prob", unless=False)
        groups: dict[str, Any] = {}
        if fields["topk_method"] == "group_limited_greedy":
            names = {"num_groups": "n_group", "groups_per_token": "topk_group"}
            groups = {ours: positive(fields, theirs, int) for ours, theirs in names.items()}
        else:
            refuse(fields, "topk_method", unless="greedy")
        return cls(**latent_fields(fields, choice_biased=False, normalised=False, **groups))


class DeepseekV3Config(LatentConfig):
    """`intermediate_size` is that of dense layers; several shared experts are one of all their hidden units."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DeepseekV3Config":
        fields = with_defaults(
            {"q_lora_rank": 1536} | dict(config),
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            first_k_dense_replace=3,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            routed_scaling_factor=2.5,
            n_group=8,
            topk_group=4,
            **_WIDTHS,
        )
        return cls(**biased_fields(fields))


_WIDTHS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def biased_fields(fields: Mapping[str, Any], *, is_sparse: Callable[[int], bool] | None = None) -> dict[str, Any]:
    """`latent_fields` of a configuration whose experts are chosen as DeepSeek-V3's are.

    Raises:
        ValueError, NotImplementedError: As `latent_fields`.
    """
    refuse(fields, "scoring_func", unless="sigmoid")
    refuse(fields, "topk_method", unless="noaux_tc")
    return latent_fields(
        fields,
        choice_biased=True,
        is_sparse=is_sparse,
        scoring="sigmoid",
        normalised=boolean(fields, "norm_topk_prob", default=True),
        num_groups=positive(fields, "n_group", int),
        groups_per_token=positive(fields, "topk_group", int),
        group_score="two_best",
    )


def latent_fields(
    fields: Mapping[str, Any], *, choice_biased: bool, is_sparse: Callable[[int], bool] | None = None, **routing: Any
) -> dict[str, Any]:
    """The arguments of a configuration that is read as DeepSeek's are.

    Args:
        fields: With the family's defaults, and without nulls.
        choice_biased: Whether the choice of experts has a bias.
        is_sparse: Which layers are; those from `first_k_dense_replace` on if None.
        routing: What else is known of it.

    Raises:
        ValueError: A field is missing or out of range.
        NotImplementedError: The model needs something that is not built.
    """
    refuse(fields, "moe_layer_freq", unless=1)
    refuse(fields, "rope_interleave", unless=True)
    for name in ("index_topk", "index_n_heads"):
        refuse(fields, name, unless=None, why=": sparse attention by an indexer is not built")
    units = positive(fields, "moe_intermediate_size", int)
    if is_sparse is None:
        is_sparse = whole(fields, "first_k_dense_replace").__le__
    rope_dim = positive(fields, "qk_rope_head_dim", int)
    factor = positive({"routed_scaling_factor": 1.0, **fields}, "routed_scaling_factor", float)
    # Heads have keys of their own only where they are made from the rows.
    shared = shared_fields({**fields, "head_dim": rope_dim, "num_key_value_heads": 1}, read=_READ)
    return {
        **shared,
        "q_rank": positive(fields, "q_lora_rank", int) if "q_lora_rank" in fields else None,
        "kv_rank": positive(fields, "kv_lora_rank", int),
        "nope_dim": positive(fields, "qk_nope_head_dim", int),
        "value_dim": positive(fields, "v_head_dim", int),
        "segments": segments(
            positive(fields, "num_hidden_layers", int), lambda layer: LayerKind(sparse=is_sparse(layer))
        ),
        "experts": Experts(
            routing=read_routing(fields, "n_routed_experts", scaling_factor=factor, **routing),
            intermediate_size=units,
            choice_biased=choice_biased,
            shared_size=units * positive(fields, "n_shared_experts", int),
        ),
    }


class DeepseekLayer(DecoderLayer):
    """A layer with latent attention."""

    attention_class: ClassVar = LatentAttention


class DeepseekV2ForCausalLM(Decoder):
    """A DeepSeek-V2 language model, such as V2-Lite or Coder-V2."""

    config_class: ClassVar = DeepseekV2Config
    layer_class: ClassVar = DeepseekLayer

    @classmethod
    def layer_tensors(cls, config: LatentConfig, kind: LayerKind) -> dict[Path, Source]:
        tensors = {
            path: source
            for path, source in tensor_names.of_layer(config).items()
            if path[:2] != ("attention", "qkv_proj")
        }
        tensors |= _attention_tensors(config)
        if not kind.sparse:
            return tensors
        assert config.experts is not None
        tensors |= tensor_names.of_mixture_beside_shared(config.experts, "mlp.shared_experts")
        if config.experts.choice_biased:
            tensors["mlp", "router", "choice_bias"] = tensor_names.whole("mlp.gate.e_score_correction_bias")
        return tensors


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """A language model of DeepSeek-V3's architecture: V3, R1, V3.1, Kimi K2. Layers that draft tokens are not read."""

    config_class: ClassVar = DeepseekV3Config

    @classmethod
    def unread_tensors(cls, config: LatentConfig) -> tuple[str, ...]:
        return (*super().unread_tensors(config), f"model.layers.{config.num_layers}.")


def _attention_tensors(config: LatentConfig) -> dict[Path, Source]:
    """Those of latent attention. What turns in pairs of neighbours there turns in halves here."""
    nope, rope, values, rank = config.nope_dim, config.rope_dim, config.value_dim, config.kv_rank

    heads = config.num_q_heads * (nope + rope)

    def of_heads(name: str, width: int, order: tuple[int, ...], sharded: Any, whole: int | None = None) -> Source:
        return Source({f"self_attn.{name}.weight": whole}, sharded, of_heads=OfHeads(width, order))

    def q(name: str) -> Source:
        return of_heads(name, nope + rope, _halves_after(nope, rope), "outputs", heads)

    latents = of_heads("kv_a_proj_with_mqa", rank + rope, _halves_after(rank, rope), None)
    first = q("q_proj") if config.q_rank is None else Source({"self_attn.q_a_proj.weight": config.q_rank})
    tensors = {
        ("attention", "in_proj", "kernel"): dataclasses.replace(first, beside=latents),
        ("attention", "kv_a_norm", "scale"): tensor_names.whole("self_attn.kv_a_layernorm.weight"),
        ("attention", "k_up"): of_heads("kv_b_proj", nope + values, tuple(range(nope)), "heads"),
        ("attention", "v_up"): of_heads("kv_b_proj", nope + values, tuple(range(nope, nope + values)), "heads"),
    }
    if config.q_rank is not None:
        tensors["attention", "q_proj", "kernel"] = q("q_b_proj")
        tensors["attention", "q_a_norm", "scale"] = tensor_names.whole("self_attn.q_a_layernorm.weight")
    return tensors


def _halves_after(kept: int, turned: int) -> tuple[int, ...]:
    """The numbers of a head's outputs: those that stay, then of those that turn the even ones and the odd ones."""
    return (*range(kept), *range(kept, kept + turned, 2), *range(kept + 1, kept + turned, 2))
