"""Which projections of a model hold their weights in fp8: those of a checkpoint that are stored so, or all."""

from collections.abc import Mapping

from flax import nnx

from jattn_models.layers import Linear
from jattn_models.quantization import check_asked
from jattn_models.stored_tensors import StoredTensors
from jattn_models.weights import Path, Source

_IN_LAYERS = "layers"  # where a path begins; the projection back to logits is outside
_FEW_OUTPUTS = 16  # a gate: what it returns weighs whole sums, and its weights are next to nothing


def hold_in_fp8(model: nnx.Module, sources: Mapping[Path, Source], stored: StoredTensors) -> None:
    """Makes place for weights in fp8, in a model of shapes alone, where they are to be.

    A projection whose tensors are not all stored alike, those of all its layers, is held as they say in its own dtype.

    Raises:
        NotImplementedError: The checkpoint's weights cannot be held as it is asked for.
    """
    asked = stored.checkpoint.quantization
    check_asked(stored.quantization, asked)
    if stored.scales_beside:
        for path, linear in _linears(model):
            if all(map(stored.is_in_fp8, sources[*path, "kernel"].names())):
                linear.hold_in_fp8()
    elif asked is not None:
        hold_projections_in_fp8(model)


def hold_projections_in_fp8(model: nnx.Module) -> None:
    """Makes place for weights in fp8 in all projections of layers, but for gates.

    Embeddings, routers, experts and what latent attention takes up are no projections of this kind.
    """
    for path, linear in _linears(model):
        if path[0] == _IN_LAYERS and linear.kernel.get_value().shape[-1] >= _FEW_OUTPUTS:
            linear.hold_in_fp8()


def _linears(model: nnx.Module) -> list[tuple[Path, Linear]]:
    return [(path, module) for path, module in nnx.iter_modules(model) if isinstance(module, Linear)]
