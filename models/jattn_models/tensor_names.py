"""Where a decoder's leaves lie in a Hugging Face checkpoint: Llama's names, from which families deviate."""

import dataclasses
from collections.abc import Callable, Mapping

from jattn_models.decoder_config import DecoderConfig
from jattn_models.experts import Experts
from jattn_models.layer_pattern import LayerKind
from jattn_models.weights import Joined, Path, Source, Widths

# What the norms of a layer are called: Llama's names, OLMo 2's and Gemma's.
_NORMS = {
    "before": {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    "after": {"attended_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    "both": {
        "input_norm": "input_layernorm",
        "attended_norm": "post_attention_layernorm",
        "post_attention_norm": "pre_feedforward_layernorm",
        "mlp_norm": "post_feedforward_layernorm",
    },
}
_OF_LAYER = "model.layers.{layer}."
_OF_EXPERTS = (("mlp", "gate_up_proj"), ("mlp", "down_proj"))  # in a sparse layer


def whole(name: str) -> Source:
    """A leaf of one tensor, which each device has all of."""
    return Source({name: None})


def split_outputs(parts: str | Mapping[str, Widths], unit: int = 1, *, alternating: bool = False) -> Source:
    """A leaf whose outputs devices share, each block by itself, in whole units; a name alone is one block."""
    parts = {parts: None} if isinstance(parts, str) else parts
    return Source(parts, "outputs", alternating=alternating, unit=unit)


def split_inputs(name: str) -> Source:
    """A leaf whose inputs devices share, or an embedding whose tokens they do."""
    return Source({name: None}, "inputs")


def of_model[Config: DecoderConfig](
    config: Config,
    layer_tensors: Callable[[Config, LayerKind], Mapping[Path, Source | Mapping[str, Widths]]],
    *,
    by_expert: bool = False,
) -> dict[Path, Source]:
    """The sources of all leaves.

    Args:
        layer_tensors: For each leaf of a layer its source, names without the layer's prefix; parts alone, without a
            source, are a leaf that each device has all of.
        by_expert: Whether devices share a mixture's experts by number.
    """
    sources: dict[Path, Source] = {
        ("vocabulary", "embedding"): split_inputs("model.embed_tokens.weight"),
        ("norm", "scale"): whole("model.norm.weight"),
    }
    if config.layer_norm:
        sources["norm", "bias"] = whole("model.norm.bias")
    if not config.tied:
        sources[("vocabulary", "lm_head", "kernel")] = split_outputs("lm_head.weight")
    for number, (layers, kind) in enumerate(config.stacks):
        for path, source in layer_tensors(config, kind).items():
            source = source if isinstance(source, Source) else Source(source)
            if by_expert and kind.sparse and path[:2] in _OF_EXPERTS:
                source = dataclasses.replace(source, sharded="experts", joined=None)
            sources[("layers", number, *path)] = _of_layers(config, layers, source)
    return sources


def _of_layers(config: DecoderConfig, layers: range, source: Source) -> Source:
    """The source of a leaf of all these layers, given that of one."""
    numbers, joined, beside = {"layer": layers}, source.joined, source.beside
    if config.experts is not None and any("{expert}" in name for name in source.parts):
        numbers["expert"] = range(config.experts.routing.num_experts)
    if joined is not None:
        joined = dataclasses.replace(joined, parts=tuple(_OF_LAYER + name for name in joined.parts))
    return dataclasses.replace(
        source,
        parts={_OF_LAYER + name: width for name, width in source.parts.items()},
        numbers=numbers,
        joined=joined,
        beside=None if beside is None else _of_layers(config, layers, beside),
    )


def of_layer(config: DecoderConfig) -> dict[Path, Source]:
    """A dense layer's tensors, by Llama's names."""
    q, kv = (heads * config.head_dim for heads in (config.num_q_heads, config.num_kv_heads))
    widths = {"q": q, "k": kv, "v": kv}
    sources = {
        **{(norm, "scale"): whole(f"{name}.weight") for norm, name in _NORMS[config.norms].items()},
        ("attention", "qkv_proj", "kernel"): split_outputs(
            {f"self_attn.{x}_proj.weight": width for x, width in widths.items()}, unit=config.head_dim
        ),
        ("attention", "o_proj", "kernel"): split_inputs("self_attn.o_proj.weight"),
        **of_gated_mlp(("mlp",), "mlp", config.intermediate_size, biased=config.mlp_bias),
    }
    if config.layer_norm:
        sources |= {(norm, "bias"): whole(f"{name}.bias") for norm, name in _NORMS[config.norms].items()}
    if config.o_bias:
        sources["attention", "o_proj", "bias"] = whole("self_attn.o_proj.bias")
    if config.qkv_bias:
        biases = {f"self_attn.{x}_proj.bias": width for x, width in widths.items()}
        sources["attention", "qkv_proj", "bias"] = split_outputs(biases, unit=config.head_dim)
    if config.qk_norm in ("head", "projection"):
        for x in ("q", "k"):
            name = f"self_attn.{x}_norm.weight"
            of_projection = split_outputs({name: widths[x]}, unit=config.head_dim)
            sources["attention", f"{x}_norm", "scale"] = whole(name) if config.qk_norm == "head" else of_projection
    return sources


def of_layer_but_its_mlp(config: DecoderConfig) -> dict[Path, Source]:
    """Those of a layer whose MLP's tensors have other names."""
    return {path: source for path, source in of_layer(config).items() if path[0] != "mlp"}


def of_gated_mlp(
    path: Path,
    prefix: str,
    units: int,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    biased: bool = False,
) -> dict[Path, Source]:
    """A gated MLP's tensors.

    Args:
        path: Of the MLP in a layer.
        prefix: Of the tensors.
        units: Hidden units.
        gate, up, down: What the projections are called.
        biased: Whether they have biases.
    """
    gate_up = [f"{prefix}.{name}" for name in (gate, up)]
    sources = {
        (*path, "gate_up_proj", "kernel"): split_outputs({f"{name}.weight": units for name in gate_up}),
        (*path, "down_proj", "kernel"): split_inputs(f"{prefix}.{down}.weight"),
    }
    if biased:
        sources[*path, "gate_up_proj", "bias"] = split_outputs({f"{name}.bias": units for name in gate_up})
        sources[*path, "down_proj", "bias"] = whole(f"{prefix}.{down}.bias")
    return sources


def of_plain_mlp(path: Path, prefix: str, *, up: str, down: str, biased: bool) -> dict[Path, Source]:
    """The tensors of an MLP without gate.

    Args:
        path: Of the MLP in a layer.
        prefix: Of the tensors.
        up, down: What the projections are called.
        biased: Whether they have biases.
    """
    sources = {
        (*path, "up_proj", "kernel"): split_outputs(f"{prefix}.{up}.weight"),
        (*path, "down_proj", "kernel"): split_inputs(f"{prefix}.{down}.weight"),
    }
    if biased:
        sources[*path, "up_proj", "bias"] = split_outputs(f"{prefix}.{up}.bias")
        sources[*path, "down_proj", "bias"] = whole(f"{prefix}.{down}.bias")
    return sources


def of_mixture(
    units: int, prefix: str = "mlp", *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[Path, Source]:
    """A mixture's tensors, in place of a dense layer's MLP.

    Args:
        units: Hidden units of one expert.
        prefix: Of the router and the experts.
        gate, up, down: What an expert's projections are called.
    """
    router = {("mlp", "router", "kernel"): whole(f"{prefix}.gate.weight")}
    return router | of_gated_mlp(("mlp",), prefix + ".experts.{expert}", units, gate=gate, up=up, down=down)


def of_mixture_beside_shared(experts: Experts, shared: str) -> dict[Path, Source]:
    """Those of a mixture and of its shared expert, which is held behind the others where it may be.

    Args:
        experts: With a shared one.
        shared: Prefix of its tensors.
    """
    assert experts.shared_size is not None
    beside = of_gated_mlp(("mlp", "shared"), shared, experts.shared_size)
    tensors = of_mixture(experts.intermediate_size)
    for path in _OF_EXPERTS if experts.joined else ():
        parts = tuple(beside["mlp", "shared", path[-1], "kernel"].parts)
        source, joined = tensors[*path, "kernel"], Joined(parts, experts.joined)
        tensors[*path, "kernel"] = dataclasses.replace(source, joined=joined)
    return tensors | beside  # of the shared one by itself where devices have experts whole
