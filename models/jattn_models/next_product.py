"""The product that a layer begins with, as the layer before it may take it."""

from typing import Any

from jattn.matmul import INT4, NextProduct, QuantizedKernel
from jattn_models.layers import Linear
from jattn_models.norms import RMSNorm


def next_product(norm: RMSNorm, projection: Linear) -> NextProduct | None:
    """The product of what a norm gives; None where weights are in fp8, or are not read from stacks of all layers."""
    if norm.scale is None:
        return None
    (scale, scale_layer), (kernel, layer) = norm.scale.stack_and_layer, projection.weights()
    if isinstance(kernel, QuantizedKernel) and kernel.dtype != INT4:
        return None
    if scale_layer is None or layer is None:
        return None
    facts: dict[str, Any] = {"bias": projection.bias_stack, "eps": norm.eps, "offset": norm.offset}
    return NextProduct(scale=scale, scale_layer=scale_layer, kernel=kernel, layer_index=layer, **facts)
