"""AttentionSpec: the static facts of one attention layer."""

import dataclasses
import math
import numbers
from typing import Literal

PageLayout = Literal["NHD", "HND"]
CombinedPool = Literal["pages_first", "kv_first"]

_INT32_MAX = 2**31 - 1
_FACTORS = (1e-30, 1e30)  # of logits, the least and the most: float32 holds them and what is made of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a kernel must know at compile time about one attention layer; hashable.

    All rules speak of absolute positions: a query at p sees the key at j if every active rule allows it.

    Attributes:
        num_q_heads: Query heads on this device; a multiple of `num_kv_heads`.
        num_kv_heads: Key and value heads on this device.
        head_dim: Width of a query and key head.
        v_head_dim: Width of a value head; `head_dim` if None.
        sm_scale: Factor on q.k before anything else; 1 / sqrt(head_dim) if None.
        logits_soft_cap: cap * tanh(logit / cap) after scaling; None is off.
        causal: j <= p.
        window_left: j >= p - window_left, so window_left + 1 keys with the own one; None is off, 0 is legal.
        window_right: j <= p + window_right, for layers that are not causal; None is off.
        chunk_size: j // chunk_size == p // chunk_size; None is off.
        rope_theta: Base of a rotary embedding inside the kernel, of halves, not interleaved: queries and keys arrive
            unrotated, and pair i turns by (position / rope_scale) * rope_theta^(-2 i / head_dim); None is off.
        rope_scale: What positions are divided by in that embedding.
        page_layout: Axes of a page, "NHD" [page_size, K, H] or "HND" [K, page_size, H].
        combined_pool: Set if K and V share one array, passed as `k_pages` with `v_pages` None: "pages_first" is
            [P, 2, ...], "kv_first" is [2, P, ...]; None means two arrays.
        batch_invariant: Ask for results that do not depend, to the bit, on the batch around a request.

    Raises:
        ValueError: A field contradicts its rule or another field.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    sm_scale: float | None = None
    logits_soft_cap: float | None = None
    causal: bool = True
    window_left: int | None = None
    window_right: int | None = None
    chunk_size: int | None = None
    rope_theta: float | None = None
    rope_scale: float = 1.0
    page_layout: PageLayout = "NHD"
    combined_pool: CombinedPool | None = None
    batch_invariant: bool = False

    def __post_init__(self):
        for name in ("causal", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False. Got {name}={getattr(self, name)!r}.")
        for name in ("sm_scale", "logits_soft_cap", "rope_theta", "rope_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real | None):
                raise ValueError(f"`{name}` must be a number known when tracing. Got {name}={value!r}.")
        for name in ("num_q_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1. Got {name}={value!r}.")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                "`num_q_heads` must be a multiple of `num_kv_heads`. "
                f"Got num_q_heads={self.num_q_heads}, num_kv_heads={self.num_kv_heads}."
            )
        for name, least in (("v_head_dim", 1), ("window_left", 0), ("window_right", 0), ("chunk_size", 1)):
            value = getattr(self, name)
            if value is not None and not (is_whole(value) and least <= value <= _INT32_MAX):
                raise ValueError(
                    f"`{name}` must be None (off) or a whole number in {least} .. {_INT32_MAX}. Got {name}={value!r}."
                )
        least, most = _FACTORS
        if self.logits_soft_cap is not None and not (least <= self.logits_soft_cap <= most):
            raise ValueError(
                f"`logits_soft_cap` must be None (off) or in {least} .. {most}. Got {self.logits_soft_cap}."
            )
        if self.sm_scale is not None and not abs(self.sm_scale) <= most:
            raise ValueError(f"`sm_scale` must be finite, at most {most} in size. Got {self.sm_scale}.")
        for name in ("rope_theta", "rope_scale"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"`{name}` must be positive and finite. Got {name}={value}.")
        if self.rope_theta is None and self.rope_scale != 1.0:
            raise ValueError(f"`rope_scale` needs `rope_theta`, which is None. Got rope_scale={self.rope_scale}.")
        if self.rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"`rope_theta` needs an even `head_dim`. Got head_dim={self.head_dim}.")
        if self.causal and self.window_right is not None:
            raise ValueError("`window_right` needs causal=False: a causal layer sees no key to the right.")
        if self.page_layout not in ("NHD", "HND"):
            raise ValueError(f"`page_layout` must be one of NHD, HND. Got {self.page_layout!r}.")
        if self.combined_pool not in (None, "pages_first", "kv_first"):
            raise ValueError(f"`combined_pool` must be None, 'pages_first' or 'kv_first'. Got {self.combined_pool!r}.")
        if self.combined_pool and self.value_dim != self.head_dim:
            raise ValueError("`combined_pool` needs v_head_dim == head_dim: K and V share one array.")

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def scale(self) -> float:
        """The softmax scale in force."""
        return 1.0 / math.sqrt(self.head_dim) if self.sm_scale is None else self.sm_scale


def is_whole(value) -> bool:
    """Whether a value is an integer, of Python or NumPy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
