"""Which layers are sparse, as Qwen's configurations state it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jattn_models.config_fields import positive
from jattn_models.layer_pattern import LayerKind, Segment, segments


def sparse_by_step(fields: Mapping[str, Any], layers: Sequence[Segment]) -> tuple[Segment, ...]:
    """The layers, every `decoder_sparse_step`-th of them sparse, unless `mlp_only_layers` has its number.

    Raises:
        ValueError: A field is no such number or list.
    """
    step, dense = positive(fields, "decoder_sparse_step", int), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ValueError(f"`mlp_only_layers` must be a list of layers' numbers. Got {dense!r}.")
    if step == 1 and not dense:
        return tuple(Segment(each.layers, tuple(_sparse(kind) for kind in each.period)) for each in layers)

    def kind_of(layer: int) -> LayerKind:
        kind = next(each.kind_of(layer) for each in layers if layer in each.layers)
        return _sparse(kind) if layer not in dense and (layer + 1) % step == 0 else kind

    return segments(layers[-1].layers.stop, kind_of)


def _sparse(kind: LayerKind) -> LayerKind:
    return dataclasses.replace(kind, sparse=True)
