"""DecoderConfig: the facts of a decoder, and how the fields that all families share are read."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from jattn.page_lists import AttentionSpan
from jattn_models.config_fields import boolean, positive, refuse
from jattn_models.experts import Experts
from jattn_models.layer_pattern import LayerKind, RopeName, Segment
from jattn_models.quantization import Quantization
from jattn_models.quantization_config import read_quantization
from jattn_models.rope import Rope, context_len
from jattn_models.temperature import Temperature
from jattn_models.unread_fields import refuse_unread

QKNorm = Literal["head", "unit", "projection"]
Norms = Literal["before", "after", "both"]
_BIASES = {"attention_bias": ("qkv_bias", "o_bias"), "mlp_bias": ("mlp_bias",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Static and hashable. A family is a subclass that reads its own config.json.

    Attributes:
        segments: The layers.
        context_len: Positions that the model was made for, in tokens.
        rope: The rotary embedding that kinds of layers call "global".
        local_rope: The one that they call "local".
        tied: Whether the embedding is also the output projection.
        qkv_bias: Whether queries, keys and values have a bias.
        o_bias: Whether attention's output projection has one.
        mlp_bias: Whether both projections of a dense layer's MLP have one.
        qk_norm: The norm that queries and keys pass before they turn: of each "head"; the same without weights in
            layers that turn them, "unit"; of all heads of a "projection" together; None for none.
        qkv_clip: The most that a query's, key's or value's numbers are in size, after that norm; None is off.
        attention_scale: Factor on q.k; 1 / sqrt(head_dim) if None.
        attention_cap: Soft cap of q.k after it; None is off.
        sinks: Whether each head has one: a logit that counts in the softmax's denominator alone.
        temperature: Of queries that do not turn, or of all; None for none.
        gated: Whether the MLPs of dense layers have a gate.
        activation: Theirs, by Hugging Face's name.
        norms: Where the norms of attention and MLP stand: "before" them, "after" them and before the sum, or "both".
        layer_norm: Whether norms of the residual stream go by mean and deviation and have biases.
        norm_offset: What a norm's factor is above its weight.
        embedding_scale: Factor on the embedded tokens.
        residual_scale: Factor on what attention and MLP add to the residual stream.
        logit_scale: Factor on the logits.
        logit_cap: Soft cap of the logits after it; None is off.
        experts: The mixture of sparse layers; None if all are dense.
        quantization: How the checkpoint's weights in few bits are scaled; None if it has none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    segments: tuple[Segment, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    rms_norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    qkv_clip: float | None = None
    local_rope: Rope | None = None
    attention_scale: float | None = None
    attention_cap: float | None = None
    sinks: bool = False
    temperature: Temperature | None = None
    gated: bool = True
    activation: str = "silu"
    norms: Norms = "before"
    layer_norm: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    experts: Experts | None = None
    quantization: Quantization | None = None

    def __post_init__(self):
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                "`num_attention_heads` must be a multiple of `num_key_value_heads`. "
                f"Got {self.num_q_heads} and {self.num_kv_heads}."
            )

    @property
    def num_layers(self) -> int:
        return self.segments[-1].layers.stop

    @property
    def stacks(self) -> tuple[tuple[range, LayerKind], ...]:
        """The numbers of the layers that are stacked together, and their kind; in the order of the segments."""
        return tuple(stack for segment in self.segments for stack in segment.stacks)

    @property
    def spans(self) -> tuple[AttentionSpan, ...]:
        """Those of the layers, each once, the farthest first: the groups of the pool."""
        spans = dict.fromkeys(kind.span for _, kind in self.stacks)
        return tuple(sorted(spans, key=lambda span: -span.most_keys))

    @property
    def ropes(self) -> dict[RopeName, Rope]:
        """The rotary embeddings by the names that kinds of layers call them."""
        return {"global": self.rope} if self.local_rope is None else {"global": self.rope, "local": self.local_rope}

    def for_context(self, max_context_len: int) -> "DecoderConfig":
        """The configuration where texts of so many tokens at most are served."""
        local_rope = None if self.local_rope is None else self.local_rope.for_context(max_context_len)
        return dataclasses.replace(self, rope=self.rope.for_context(max_context_len), local_rope=local_rope)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """The configuration as Hugging Face writes it; absent fields have the defaults that it gives them.

        Raises:
            ValueError: A field is missing or out of range.
            NotImplementedError: The model needs something that is not built.
        """
        raise NotImplementedError(f"{cls.__name__} must say how it is read.")


def shared_fields(fields: Mapping[str, Any], *, read: Collection[str] = ()) -> dict[str, Any]:
    """What all families read alike, as arguments of a DecoderConfig: all that must be there but `segments`.

    Args:
        fields: With the family's defaults, and without nulls.
        read: Fields that the family reads of those that are else refused. What `attention_bias`, of all four
            projections, `mlp_bias` and `partial_rotary_factor` say is read here.

    Raises:
        ValueError: A field is missing or out of range.
        NotImplementedError: The model needs something that is not built.
    """
    positions = context_len(fields)
    refuse_unread(fields, read, positions)
    refuse(fields, "hidden_act", unless="silu")
    hidden_size = positive(fields, "hidden_size", int)
    num_q_heads = positive(fields, "num_attention_heads", int)
    if "head_dim" not in fields and hidden_size % num_q_heads:
        raise ValueError(
            "`hidden_size` must be a multiple of `num_attention_heads` where there is no `head_dim`. "
            f"Got {hidden_size} and {num_q_heads}."
        )
    fields = {"num_key_value_heads": num_q_heads, "head_dim": hidden_size // num_q_heads, **fields}
    head_dim = positive(fields, "head_dim", int)
    biases = {
        leaf: boolean(fields, name, default=False)
        for name, leaves in _BIASES.items()
        if name in read
        for leaf in leaves
    }
    return {
        "vocab_size": positive(fields, "vocab_size", int),
        "hidden_size": hidden_size,
        "intermediate_size": positive(fields, "intermediate_size", int),
        "num_q_heads": num_q_heads,
        "num_kv_heads": positive(fields, "num_key_value_heads", int),
        "head_dim": head_dim,
        "context_len": positions,
        "rms_norm_eps": positive(fields, "rms_norm_eps", float),
        "rope": Rope.from_config(fields, head_dim, partial="partial_rotary_factor" in read),
        "tied": boolean(fields, "tie_word_embeddings", default=False),
        "quantization": read_quantization(fields),
        **biases,
    }
