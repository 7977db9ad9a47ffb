"""A layer's facts in the kernels' words, and what makes two layers one kind."""

import functools
from typing import Any, NamedTuple

from jattn.attention.layer import AttentionLayer
from jattn_kernels.spec import AttentionSpec, PageLayout


class LayerKind(NamedTuple):
    """What layers have in common that share a schedule."""

    spec: AttentionSpec
    latent: bool
    is_cross: bool


def kind_of(layer: AttentionLayer, page_layout: PageLayout = "NHD") -> LayerKind:
    """The kind of a layer; what `use_irope` adds is a matter of its backend.

    Raises:
        ValueError: A layer of cross attention has a window.
    """
    return _kind(tuple(getattr(layer, name) for name in _FACTS), page_layout)


def spec_of(layer: AttentionLayer, page_layout: PageLayout = "NHD") -> AttentionSpec:
    """A layer's facts in the kernels' words, as of `kind_of`."""
    return kind_of(layer, page_layout).spec


_FACTS = (
    *("tp_q_head_num", "tp_k_head_num", "head_dim", "v_head_dim", "scaling", "logit_cap", "sliding_window_size"),
    *("chunk_size", "is_cross_attention", "kv"),
)


@functools.lru_cache(maxsize=1024)  # a step asks once a layer
def _kind(facts: tuple[Any, ...], page_layout: PageLayout) -> LayerKind:
    num_q_heads, num_kv_heads, head_dim, v_head_dim, scaling, logit_cap, window, chunk_size, is_cross, kv = facts
    if is_cross and window >= 0:
        raise ValueError(f"`sliding_window_size` must be -1 in cross attention. Got {window}.")
    spec = AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        sm_scale=scaling,
        logits_soft_cap=logit_cap or None,
        causal=not is_cross,
        window_left=window if window >= 0 else None,
        chunk_size=chunk_size,
        page_layout=page_layout,
    )
    return LayerKind(spec, kv == "latent", is_cross)
