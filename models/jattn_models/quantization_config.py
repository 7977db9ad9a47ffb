"""`quantization_config` of config.json: what it announces, by whichever tool wrote it.

Which projections are quantised the tensors themselves say, so that lists of those that are not are left unread.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jattn_models.compressed_tensors import read_groups
from jattn_models.int4_config import read_awq, read_gptq
from jattn_models.quantization import ChannelScales, Mxfp4, Quantization, block_scales, check_fields, refuse_announced

_LISTS = ("modules_to_convert", "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


def read_quantization(fields: Mapping[str, Any]) -> Quantization | None:
    """What `quantization_config` says; None where the weights are not quantised.

    Args:
        fields: Without nulls.

    Raises:
        NotImplementedError: It announces something else than fp8, int4, or mxfp4 of experts.
    """
    announced = fields.get("quantization_config")
    if not announced:
        return None
    if not isinstance(announced, Mapping):
        refuse_announced(repr(announced))
    given = {name: value for name, value in announced.items() if value is not None and name not in _LISTS}
    method = given.pop("quant_method", None)
    if not isinstance(method, str) or method not in _READERS:
        refuse_announced(f"quant_method={method!r}")
    return _READERS[method](given)


def _of_transformers(given: Mapping[str, Any]) -> Quantization:
    given = {"activation_scheme": "dynamic", **given}
    is_static, is_in_blocks = given["activation_scheme"] == "static", "weight_block_size" in given
    schemes = ("dynamic",) if is_in_blocks else ("dynamic", "static")
    allowed = {"fmt": ("e4m3",), "activation_scheme": schemes, "expert_dtype": ("fp8",)}
    check_fields(given, allowed | dict.fromkeys(("scale_fmt", "dequantize", "weight_block_size")))
    if is_in_blocks:
        return block_scales(given["weight_block_size"], "weight_block_size")
    return ChannelScales(("activation_scheme='static'",) if is_static else ())


def _of_fbgemm(given: Mapping[str, Any]) -> Quantization:
    """Where a token's largest number is above a bound, its others are rounded as if it were: here by its own size."""
    check_fields(given, {"activation_scale_ub": None})
    return ChannelScales()


def _of_modelopt(given: Mapping[str, Any]) -> Quantization:
    unread = ("producer", "config_groups", "kv_cache_scheme", "kv_cache_quant_algo")
    algorithms = {"FP8": ("quant_algo='FP8' (static scales of activations)",), "FP8_PER_CHANNEL_PER_TOKEN": ()}
    given = {"quant_algo": None, **given}
    check_fields(given, {"quant_algo": tuple(algorithms), **dict.fromkeys(unread)})
    keys = [f"{name}={given[name]!r}" for name in unread[2:] if given.get(name)]
    return ChannelScales((*algorithms[given["quant_algo"]], *keys))


def _of_gpt_oss(given: Mapping[str, Any]) -> Quantization:
    check_fields(given, {"dequantize": None})
    return Mxfp4()


_READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": _of_transformers,
    "fbgemm_fp8": _of_fbgemm,
    "modelopt": _of_modelopt,
    "compressed-tensors": read_groups,
    "awq": read_awq,
    "gptq": read_gptq,
    "mxfp4": _of_gpt_oss,
}
