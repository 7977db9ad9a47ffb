"""Where a decoder's leaves lie in a Hugging Face checkpoint: Llama's names, from which families deviate."""

from collections.abc import Callable, Mapping

from jattn_models.decoder_config import DecoderConfig
from jattn_models.layer_pattern import LayerKind
from jattn_models.weights import Path, Source

Parts = Mapping[str, int | None]  # tensors side by side in a leaf, and how much of its last axis each takes


def of_model[Config: DecoderConfig](
    config: Config, layer_tensors: Callable[[Config, LayerKind], Mapping[Path, Parts]]
) -> dict[Path, Source]:
    """The sources of all leaves.

    Args:
        layer_tensors: For each leaf of a layer its tensors, their names without the layer's prefix.
    """
    sources: dict[Path, Source] = {
        ("vocabulary", "embedding"): Source({"model.embed_tokens.weight": None}),
        ("norm", "scale"): Source({"model.norm.weight": None}),
    }
    if not config.tied:
        sources[("vocabulary", "lm_head", "kernel")] = Source({"lm_head.weight": None})
    for number, (layers, kind) in enumerate(config.stacks):
        for path, parts in layer_tensors(config, kind).items():
            names = {"model.layers.{layer}." + name: width for name, width in parts.items()}
            numbers = {"layer": layers}
            if config.experts is not None and any("{expert}" in name for name in names):
                numbers["expert"] = range(config.experts.count)
            sources[("layers", number, *path)] = Source(names, numbers)
    return sources


def of_layer(config: DecoderConfig) -> dict[Path, Parts]:
    """A dense layer's tensors, by Llama's names."""
    q, kv = (heads * config.head_dim for heads in (config.num_q_heads, config.num_kv_heads))
    widths = {"q": q, "k": kv, "v": kv}
    tensors: dict[Path, Parts] = {
        ("input_norm", "scale"): {"input_layernorm.weight": None},
        ("attention", "qkv_proj", "kernel"): {f"self_attn.{x}_proj.weight": width for x, width in widths.items()},
        ("attention", "o_proj", "kernel"): {"self_attn.o_proj.weight": None},
        ("post_attention_norm", "scale"): {"post_attention_layernorm.weight": None},
        ("mlp", "gate_up_proj", "kernel"): {
            "mlp.gate_proj.weight": config.intermediate_size,
            "mlp.up_proj.weight": config.intermediate_size,
        },
        ("mlp", "down_proj", "kernel"): {"mlp.down_proj.weight": None},
    }
    if config.qkv_bias:
        tensors["attention", "qkv_proj", "bias"] = {f"self_attn.{x}_proj.bias": width for x, width in widths.items()}
    if config.qk_norm:
        tensors["attention", "q_norm", "scale"] = {"self_attn.q_norm.weight": None}
        tensors["attention", "k_norm", "scale"] = {"self_attn.k_norm.weight": None}
    return tensors


def of_mixture(units: int, prefix: str, *, gate: str, up: str, down: str) -> dict[Path, Parts]:
    """A mixture's tensors, in place of a dense layer's MLP.

    Args:
        units: Hidden units of one expert.
        prefix: Of the router and the experts.
        gate, up, down: What an expert's projections are called.
    """
    expert = prefix + ".experts.{expert}."
    return {
        ("mlp", "router", "kernel"): {f"{prefix}.gate.weight": None},
        ("mlp", "gate_up_proj", "kernel"): {f"{expert}{gate}.weight": units, f"{expert}{up}.weight": units},
        ("mlp", "down_proj", "kernel"): {f"{expert}{down}.weight": None},
    }
