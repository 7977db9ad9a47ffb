"""A layer's facts in the kernels' words, and what makes two layers one kind."""

import functools
from typing import NamedTuple

from jattn.attention.latent_form import HeadWidths
from jattn.attention.layer import AttentionLayer
from jattn_kernels.spec import AttentionSpec, PageLayout


class LayerKind(NamedTuple):
    """What layers have in common that share a schedule."""

    spec: AttentionSpec
    latent: bool
    is_cross: bool
    has_sinks: bool = False
    head_widths: HeadWidths | None = None


_spec = functools.lru_cache(maxsize=1024)(AttentionSpec)  # a step asks once a layer


def kind_of(layer: AttentionLayer, page_layout: PageLayout = "NHD", *, batch_invariant: bool = False) -> LayerKind:
    """The kind of a layer; what `use_irope` adds is a matter of its backend.

    Args:
        batch_invariant: As of the kernels' spec.

    Raises:
        ValueError: A layer of cross attention has a window.
    """
    is_cross, window = layer.is_cross_attention, layer.sliding_window_size
    if is_cross and window >= 0:
        raise ValueError(f"`sliding_window_size` must be -1 in cross attention. Got {window}.")
    spec = _spec(
        num_q_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        sm_scale=layer.scaling,
        logits_soft_cap=layer.logit_cap or None,
        causal=not is_cross,
        window_left=window if window >= 0 else None,
        chunk_size=layer.chunk_size,
        page_layout=page_layout,
        batch_invariant=batch_invariant,
    )
    return LayerKind(spec, layer.kv == "latent", is_cross, layer.sinks is not None, layer.head_widths)


def spec_of(layer: AttentionLayer, page_layout: PageLayout = "NHD") -> AttentionSpec:
    """A layer's facts in the kernels' words, as of `kind_of`."""
    return kind_of(layer, page_layout).spec
