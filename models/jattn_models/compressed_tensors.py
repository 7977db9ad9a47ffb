"""compressed-tensors: what its groups in `quantization_config` say of weights and activations."""

from collections.abc import Mapping
from typing import Any

from jattn_models.quantization import (
    BlockScales,
    ChannelScales,
    GroupScales,
    Quantization,
    block_scales,
    check_fields,
    group_scales,
    refuse_announced,
    refuse_order,
)

_IN_INT4 = "pack-quantized"
_FORMATS = ("float-quantized", _IN_INT4)
_SAID_ELSEWHERE = ("version", "quantization_status", "global_compression_ratio")
_FP8 = {"num_bits": (8,), "type": ("float",), "symmetric": (True,)}
_INT4 = {"num_bits": (4,), "type": ("int",), "symmetric": (True, False)}
_OWN_ORDER = (False, "weight", "static")  # in which groups were rounded, and not of which inputs they are
_OBSERVED = dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"))  # how scales were found


def read_groups(given: Mapping[str, Any]) -> Quantization:
    """What all groups say alike.

    Args:
        given: Fields of the announcement, without nulls.

    Raises:
        NotImplementedError: They differ, or one announces something else than fp8 or int4.
    """
    allowed = dict.fromkeys((*_SAID_ELSEWHERE, "config_groups", "kv_cache_scheme"))
    sparsity, others = given.get("sparsity_config"), {**given, "sparsity_config": {}}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        refuse_announced(f"sparsity_config.format={sparsity['format']!r}")
    empty = dict.fromkeys(("sparsity_config", "transform_config"), ({},))
    check_fields({"format": None, **others}, {"format": _FORMATS, **allowed, **empty})
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        refuse_announced(f"config_groups={groups!r}")
    keys = (f"kv_cache_scheme={given['kv_cache_scheme']!r}",) if given.get("kv_cache_scheme") else ()
    found = [_group(f"config_groups.{name}", group, given["format"]) for name, group in groups.items()]
    if all(isinstance(each, ChannelScales) for each in found):
        not_done = [each for group in found if isinstance(group, ChannelScales) for each in group.not_done]
        return ChannelScales((*dict.fromkeys(not_done), *keys))
    if keys:
        refuse_announced(keys[0])
    if len(set(found)) > 1:
        refuse_announced("config_groups that differ")
    return found[0]


def _group(name: str, group: Any, stored_as: str) -> Quantization:
    if not isinstance(group, Mapping):
        refuse_announced(f"{name}={group!r}")
    group = {field: value for field, value in group.items() if value is not None}
    read = dict.fromkeys(("targets", "weights", "input_activations"))
    check_fields(group, {"format": (stored_as,), **read}, f"{name}.")
    weights = _scheme(f"{name}.weights", group.get("weights"))
    if stored_as == _IN_INT4:
        return _in_groups(name, weights, group.get("input_activations"))
    allowed = {"strategy": ("tensor", "channel", "block"), "dynamic": (False,), "block_structure": None}
    check_fields({"strategy": None, **weights}, _FP8 | _OBSERVED | allowed, f"{name}.weights.")
    activations = f"{name}.input_activations"
    if weights["strategy"] == "block":
        return _in_blocks(name, weights, group.get("input_activations"))
    if "input_activations" not in group:
        return ChannelScales((f"{activations}=None",))
    tokens = _scheme(activations, group["input_activations"])
    schemes = {"strategy": ("token", "tensor"), "dynamic": (True, False)}
    check_fields(tokens, _FP8 | _OBSERVED | schemes, f"{activations}.")
    if tokens.get("strategy") == "token" and tokens.get("dynamic"):
        return ChannelScales()
    found = (f"{activations}.{field}={tokens.get(field)!r}" for field in ("strategy", "dynamic"))
    return ChannelScales((" and ".join(found),))


def _in_groups(name: str, weights: dict[str, Any], activations: Any) -> GroupScales:
    weights = {"strategy": None, "symmetric": True, **weights}
    order, where = weights.pop("actorder", False), f"{name}.weights."
    allowed = {"strategy": ("group", "channel"), "dynamic": (False,), "group_size": None}
    check_fields(weights, _INT4 | _OBSERVED | allowed, where)
    if activations is not None:
        refuse_announced(f"{name}.input_activations={activations!r}")
    if not any(order is each or order == each for each in _OWN_ORDER):
        refuse_order(f"{where}actorder={order!r}")
    size = weights.get("group_size") if weights["strategy"] == "group" else -1
    return group_scales("compressed-tensors", size, symmetric=weights["symmetric"], name=f"{where}group_size")


def _in_blocks(name: str, weights: Mapping[str, Any], activations: Any) -> BlockScales:
    """Blocks are held as what they stand for, so that it is all one how activations are to be rounded by parts."""
    if activations is not None:
        given = _scheme(f"{name}.input_activations", activations)
        schemes = {"strategy": ("group",), "dynamic": (True,), "group_size": None}
        check_fields(given, _FP8 | _OBSERVED | schemes, f"{name}.input_activations.")
    return block_scales(weights.get("block_structure"), f"{name}.weights.block_structure")


def _scheme(name: str, scheme: Any) -> dict[str, Any]:
    """The fields of a scheme, without nulls."""
    if not isinstance(scheme, Mapping):
        refuse_announced(f"{name}={scheme!r}")
    return {"num_bits": None, "type": None} | {field: value for field, value in scheme.items() if value is not None}
