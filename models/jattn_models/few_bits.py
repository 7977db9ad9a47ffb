"""Which projections of a model hold their weights in few bits: those of a checkpoint that are stored so, or all."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jattn_models.experts import MixtureOfExperts
from jattn_models.held_experts import hold_experts
from jattn_models.layers import Linear
from jattn_models.quantization import ChannelScales, GroupScales, Mxfp4, Quantization, check_asked
from jattn_models.stored_tensors import StoredTensors
from jattn_models.weights import Path, Source

_IN_LAYERS = "layers"  # where a path begins; the projection back to logits is outside
_FEW_OUTPUTS = 16  # a gate: what it returns weighs whole sums, and its weights are next to nothing
_GROUP_SIZE = 128  # inputs that share a scale where they are rounded here
_LEAST_GROUPS = 16  # of an output: narrow models are harmed more by rounding
_LEAST_GROUP_SIZE = 8  # with smaller ones scales take more bits than numbers


def hold_in_few_bits(model: Any, sources: Mapping[Path, Source], stored: StoredTensors) -> None:
    """Makes place for weights in fp8 or int4, in a model of shapes alone, where they are to be.

    A projection whose tensors are not all stored alike, those of all its layers, is held as they say in its own dtype.

    Raises:
        NotImplementedError: The checkpoint's weights cannot be held as it is asked for.
    """
    asked = stored.checkpoint.quantization
    check_asked(stored.quantization, asked)
    for path, mixture in _mixtures(model):
        own = [sources[*path, name, "kernel"] for name in ("gate_up_proj", "down_proj")]
        kind = stored.held_as(itertools.chain.from_iterable(source.names() for source in own))
        if kind is not None and (isinstance(kind, Mxfp4) or all("expert" in source.numbers for source in own)):
            hold_experts(mixture, kind)
    if isinstance(stored.quantization, GroupScales):
        for path, linear in _linears(model):
            names = tuple(sources[*path, "kernel"].names())
            if all(map(stored.is_in_int4, names)):
                _hold_as_stored(linear, names, stored, stored.quantization)
    elif stored.scales_beside:
        for path, linear in _linears(model):
            if all(map(stored.is_in_fp8, sources[*path, "kernel"].names())):
                linear.hold_in_fp8()
    elif asked is not None:
        hold_projections(model, asked)


def hold_projections(model: Any, quantization: str) -> None:
    """Makes place for weights in fp8 or int4 in all projections of layers, but for gates.

    Embeddings, routers and what latent attention takes up are no projections of this kind; experts are only in fp8, and
    where each is a tensor of its own.
    """
    sources = model.sources()
    if quantization == "fp8":
        for path, mixture in _mixtures(model):
            if "expert" in sources[*path, "down_proj", "kernel"].numbers:
                hold_experts(mixture, ChannelScales())
    for path, linear in _linears(model):
        if path[0] != _IN_LAYERS or linear.kernel.get_value().shape[-1] < _FEW_OUTPUTS:
            continue
        if quantization == "fp8":
            linear.hold_in_fp8()
        else:
            of_devices = model.parallel.size if sources[*path, "kernel"].sharded == "inputs" else 1
            _hold_in_int4(linear, math.gcd(group_size_of(linear.inputs * of_devices), linear.inputs))


def hold_zero_points(model: nnx.Module) -> None:
    """Makes place for zero points of all weights in int4, in a model of shapes alone."""
    for _, linear in _linears(model):
        if linear.in_int4:
            linear.hold_zero_points()


def hold_mixtures(model: Any, quantization: Quantization) -> None:
    """Makes place for experts in few bits, in a model of shapes alone, where a kernel multiplies such."""
    for _, mixture in _mixtures(model):
        hold_experts(mixture, quantization)


def group_size_of(inputs: int) -> int:
    """Of weights that are rounded here: 128, or less where an output would have less than 16 groups; a power of two."""
    size = math.gcd(inputs, _GROUP_SIZE)
    while size > _LEAST_GROUP_SIZE and inputs // size < _LEAST_GROUPS:
        size //= 2
    return size


def _hold_as_stored(linear: Linear, names: tuple[str, ...], stored: StoredTensors, scales: GroupScales) -> None:
    """A device that has some of the inputs may have parts of groups: then a group is as many as come out even."""
    size = math.gcd(scales.group_size or linear.inputs, linear.inputs)
    _hold_in_int4(linear, size, scales_dtype=stored.scales_dtype(names), zero_points=not scales.symmetric)


def _hold_in_int4(linear: Linear, group_size: int, **others: Any) -> None:
    """Not where groups are too small, or where two numbers in a byte would be of two outputs."""
    if group_size >= _LEAST_GROUP_SIZE and linear.inputs % 2 == 0:
        linear.hold_in_int4(group_size, **others)


def _mixtures(model: nnx.Module) -> list[tuple[Path, MixtureOfExperts]]:
    return [(path, module) for path, module in nnx.iter_modules(model) if isinstance(module, MixtureOfExperts)]


def _linears(model: nnx.Module) -> list[tuple[Path, Linear]]:
    return [(path, module) for path, module in nnx.iter_modules(model) if isinstance(module, Linear)]
