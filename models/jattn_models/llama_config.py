"""LlamaConfig: the facts of a Llama model, read from its config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn_models.config_fields import positive
from jattn_models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Static and hashable.

    Attributes:
        context_len: Positions that the model was made for, in tokens.
        tied: Whether the embedding is also the output projection.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    rms_norm_eps: float
    rope: Rope
    tied: bool

    def __post_init__(self):
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                "`num_attention_heads` must be a multiple of `num_key_value_heads`. "
                f"Got {self.num_q_heads} and {self.num_kv_heads}."
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """The configuration as Hugging Face writes it; absent fields have the defaults that it gives them.

        Raises:
            ValueError: A field is missing or out of range.
            NotImplementedError: The model needs something that is not built.
        """
        _refuse_unsupported(config)
        hidden_size = positive(config, "hidden_size", int)
        num_q_heads = positive(config, "num_attention_heads", int)
        if config.get("head_dim") is None and hidden_size % num_q_heads:
            raise ValueError(
                "`hidden_size` must be a multiple of `num_attention_heads` where there is no `head_dim`. "
                f"Got {hidden_size} and {num_q_heads}."
            )
        given = {name: value for name, value in config.items() if value is not None}
        defaults = {
            "num_key_value_heads": num_q_heads,
            "head_dim": hidden_size // num_q_heads,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        }
        fields = defaults | given
        head_dim = positive(fields, "head_dim", int)
        return cls(
            vocab_size=positive(fields, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=positive(fields, "intermediate_size", int),
            num_layers=positive(fields, "num_hidden_layers", int),
            num_q_heads=num_q_heads,
            num_kv_heads=positive(fields, "num_key_value_heads", int),
            head_dim=head_dim,
            context_len=positive(fields, "max_position_embeddings", int),
            rms_norm_eps=positive(fields, "rms_norm_eps", float),
            rope=Rope.from_config(given, head_dim),
            tied=bool(fields.get("tie_word_embeddings", False)),
        )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise NotImplementedError(
                f"`{name}` must be false: Llama's projections are built without biases. Got true."
            )
    if config.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"`hidden_act` must be 'silu'. Got {config['hidden_act']!r}.")
    if config.get("quantization_config"):
        raise NotImplementedError("`quantization_config` must be absent: load the checkpoint's unquantised weights.")
