"""AttentionLayer: what a backend must know about the layer that calls it."""

from typing import Literal

from jaxtyping import Array, Float, Int

from jattn.arguments import check_whole, number
from jattn.attention.latent_form import HeadWidths
from jattn.pytree import pytree, static


@pytree(kw_only=True)
class AttentionLayer:
    """What a backend must know about the layer that calls it: the functional RadixAttention of SGLang.

    Attributes:
        layer_id: Index within the layer's pool group; may be traced, so that one compiled body serves a scan.
        tp_q_head_num, tp_k_head_num, tp_v_head_num: Heads on this device.
        head_dim, v_head_dim: Widths of a key and a value head.
        scaling: Factor on q.k.
        logit_cap: Soft cap; 0 is off.
        sliding_window_size: Keys to the left, own one not counted; -1 is off.
        group: Which group of the pool holds this layer's keys.
        use_irope: Keys of the own chunk only, where the backend has an `attention_chunk_size`.
        is_cross_attention: Queries see the encoder's keys, all of them.
        k_scale, v_scale: What keys and values in fp8 are stored divided by, for all heads or for each; None is 1.
        sinks: A logit of each head that counts in the softmax's denominator alone, of all layers of the group if they
            have two axes; None is off. Where no call is made, their shape is enough.
        chunk_size: Tokens a chunk; a token sees the keys of its own one alone. None is off.
        kv: What the group's rows are: keys and values of heads, or latent rows of absorbed MLA, of which all heads are
            keys and the first `v_head_dim` numbers their values.
        head_widths: Of the heads that latent rows are compressed from; None where queries come absorbed, to `forward`
            and not to `forward_latent`.

    Raises:
        ValueError: A static field contradicts its rule, or the heads do not divide.
    """

    layer_id: Int[Array, ""] | int
    tp_q_head_num: int = static()
    tp_k_head_num: int = static()
    tp_v_head_num: int = static()
    head_dim: int = static()
    v_head_dim: int = static()
    scaling: float = static()
    logit_cap: float = static(default=0.0)
    sliding_window_size: int = static(default=-1)
    group: int = static(default=0)
    use_irope: bool = static(default=False)
    is_cross_attention: bool = static(default=False)
    k_scale: Float[Array, "..."] | None = None
    v_scale: Float[Array, "..."] | None = None
    sinks: Float[Array, "*L N"] | None = None
    chunk_size: int | None = static(default=None)
    kv: Literal["heads", "latent"] = static(default="heads")
    head_widths: HeadWidths | None = static(default=None)

    def __post_init__(self):
        check_whole(self, "tp_q_head_num", "tp_k_head_num", "tp_v_head_num", "head_dim", "v_head_dim")
        check_whole(self, "sliding_window_size", least=-1)
        check_whole(self, "group", least=0)
        check_whole(self, "chunk_size", optional=True)
        if self.tp_q_head_num % self.tp_k_head_num:
            raise ValueError(
                "`tp_q_head_num` must be a multiple of `tp_k_head_num`. "
                f"Got tp_q_head_num={self.tp_q_head_num}, tp_k_head_num={self.tp_k_head_num}."
            )
        for name in ("scaling", "logit_cap"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        if self.logit_cap < 0:
            raise ValueError(f"`logit_cap` must be at least 0 (off). Got logit_cap={self.logit_cap}.")
        if self.kv not in ("heads", "latent"):
            raise ValueError(f"`kv` must be heads or latent. Got {self.kv!r}.")
        if self.kv == "latent" and self.sinks is not None:
            raise ValueError("`sinks` must be None in a layer that reads latent rows. Got sinks with kv='latent'.")
        if self.kv == "latent" and (self.tp_k_head_num != 1 or self.is_cross_attention):
            raise ValueError(
                "`kv` may be latent in a layer of one key head that is no cross attention. "
                f"Got tp_k_head_num={self.tp_k_head_num}, is_cross_attention={self.is_cross_attention}."
            )
        if self.head_widths is not None and self.kv != "latent":
            raise ValueError(f"`head_widths` must be None where `kv` is not latent. Got {self.head_widths}.")

    @property
    def own_sinks(self) -> Float[Array, " N"] | None:
        """The sinks of this layer."""
        return self.sinks if self.sinks is None or self.sinks.ndim == 1 else self.sinks[self.layer_id]
