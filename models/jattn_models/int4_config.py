"""AWQ and GPTQ: what their announcements in `quantization_config` say of weights in int4."""

from collections.abc import Mapping
from typing import Any

from jattn_models.quantization import Quantization, check_fields, group_scales, refuse_order

_OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
_ALIKE = ("lm_head", "meta", "backend", "model_name_or_path", "model_file_base_name")
_ZERO_POINTS = ("zero_point", "sym")  # AWQ stores them in any case
_FOR_RUNNING = ("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "max_input_length")
# How GPTQ and AutoRound found the numbers, and how some runtime is to run them.
_FOUND = (
    "damp_percent",
    "damp_auto_increment",
    "static_groups",
    "true_sequential",
    "act_group_aware",
    "hyb_act",
    "mse",
    "tokenizer",
    "dataset",
    "batch_size",
    "model_seqlen",
    "pad_token_id",
    "block_name_to_quantize",
    "modules_in_block_to_quantize",
    "module_name_preceding_first_block",
    "cache_block_outputs",
    "use_cuda_fp16",
    "use_exllama",
    "disable_exllama",
    "autoround_version",
    "iters",
    "nsamples",
    "seqlen",
    "lr",
    "minmax_lr",
    "enable_quanted_input",
    "enable_minmax_tuning",
    "low_gpu_mem_usage",
    "amp",
    "gradient_accumulate_steps",
    "scale_dtype",
)


def read_awq(given: Mapping[str, Any]) -> Quantization:
    """Of fields without nulls.

    Raises:
        NotImplementedError: They announce something else than int4 as AWQ's version "gemm" packs it.
    """
    given = {_OLD_NAMES.get(name, name): value for name, value in given.items()}
    version = given.get("version", "gemm")
    given = {
        "bits": None,
        "group_size": None,
        **given,
        "version": version.lower() if isinstance(version, str) else version,
    }
    allowed = {"bits": (4,), "version": ("gemm",), "format": ("gemm",), "desc_act": (False,), "pack_dtype": ("int32",)}
    check_fields(given, allowed | dict.fromkeys((*_ALIKE, *_ZERO_POINTS, *_FOR_RUNNING, "group_size")))
    return group_scales("awq", given["group_size"])


def read_gptq(given: Mapping[str, Any]) -> Quantization:
    """Likewise.

    Raises:
        NotImplementedError: They announce something else than int4, or groups of inputs that are no neighbours.
    """
    given = {"bits": None, "group_size": None, "sym": True, **given}
    ordered, is_static = given.pop("desc_act", False), given.get("static_groups", False)
    formats, apart = ("gptq", "gptq_v2"), {"dynamic": ({},), "is_marlin_format": (False,), "data_type": ("int",)}
    allowed = {"bits": (4,), "sym": (True, False), "checkpoint_format": formats, "format": formats}
    allowed |= {"pack_dtype": ("int32",), **apart}
    check_fields(given, allowed | dict.fromkeys((*_ALIKE, *_FOUND, *_FOR_RUNNING, "group_size")))
    if ordered and not is_static and given["group_size"] != -1:
        refuse_order(f"desc_act={ordered!r}")
    packing = given.get("checkpoint_format", given.get("format", "gptq"))
    return group_scales(packing, given["group_size"], symmetric=given["sym"])
