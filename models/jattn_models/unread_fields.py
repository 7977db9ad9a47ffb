"""Fields that change what one architecture computes, refused where another does not read them."""

from collections.abc import Collection, Mapping
from typing import Any

from jattn_models.config_fields import boolean, refuse

# Each with the value that changes nothing, as null and absence do not.
_NEUTRAL: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "sliding_window": None,
    "attention_chunk_size": None,
    "dual_chunk_attention_config": None,
    "layer_types": None,
    "no_rope_layers": None,
    "attn_temperature_tuning": False,
    "llama_4_scaling": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "scoring_func": "softmax",
    "clip_qkv": None,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}


def refuse_unread(fields: Mapping[str, Any], read: Collection[str], context_len: int) -> None:
    """Refuses what would change the model and is not read.

    Args:
        fields: Without nulls.
        read: Names of those that the architecture reads.
        context_len: Positions that the model was made for, in tokens.

    Raises:
        NotImplementedError: A field asks for what is not built for this architecture.
        ValueError: `use_sliding_window` is not true or false.
    """
    for name, neutral in _NEUTRAL.items():
        if name in fields and name not in read and not _leaves_layers_alone(name, fields, context_len):
            refuse(fields, name, unless=neutral, why=": nothing else is built for this architecture")


def _leaves_layers_alone(name: str, fields: Mapping[str, Any], context_len: int) -> bool:
    """Whether a field says in its own way that all layers see all keys, or that all of them turn."""
    value = fields[name]
    if name == "sliding_window" and not boolean(fields, "use_sliding_window", default=True):
        return True
    if name in ("sliding_window", "attention_chunk_size"):
        return isinstance(value, int) and value >= context_len
    plain = {"layer_types": "full_attention", "no_rope_layers": 1}
    return name in plain and isinstance(value, list) and all(given == plain[name] for given in value)
