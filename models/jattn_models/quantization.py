"""Quantization: how a checkpoint stores the weights of its projections, and the sentences for what is not read."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

Packing = Literal["awq", "gptq", "gptq_v2", "compressed-tensors"]


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """Weights in fp8 (e4m3) with a factor for each block (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    Attributes:
        rows, columns: Of a block, along the last two axes of a tensor as it is stored; the last ones may have fewer.
    """

    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class ChannelScales:
    """Weights in fp8 (e4m3) with a factor for each output channel, or one for the tensor; tokens have their own.

    Attributes:
        not_done: What is announced beside that and not built, as "name=value".
    """

    not_done: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GroupScales:
    """Weights in int4 with a factor, and perhaps a zero point, for each group of inputs of an output.

    Attributes:
        packing: Which tensors they are stored as, and how; see `jattn_models.packed_int4`.
        group_size: Inputs; None where all of an output's are one group.
        symmetric: Whether all zero points are the middle of what four bits hold, so that there is no need of them.
    """

    packing: Packing
    group_size: int | None
    symmetric: bool = False


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """Weights of experts in fp4 (e2m1) with a power of two for each 32 inputs; see `jattn_models.mxfp4`."""


Quantization = BlockScales | ChannelScales | GroupScales | Mxfp4


def check_asked(announced: Quantization | None, asked: str | None) -> None:
    """Checks that what a checkpoint stores may be held as it is asked for.

    Args:
        asked: What the weights of projections are to be held in; None for what the checkpoint says.

    Raises:
        NotImplementedError: It may not.
    """
    if isinstance(announced, BlockScales) and asked is not None:
        raise NotImplementedError(
            "`quantization` must be None for a checkpoint in fp8 with a scale for each block, which is held as what it "
            f"stands for in `dtype`: load an unquantised one. Got {asked!r}."
        )
    held = {ChannelScales: "fp8", GroupScales: "int4"}.get(type(announced))
    if held is not None and asked not in (None, held):
        raise NotImplementedError(
            f"`quantization` must be None or {held!r} for a checkpoint that is stored in {held}: load an unquantised "
            f"one. Got {asked!r}."
        )
    if isinstance(announced, ChannelScales) and announced.not_done and asked is None:
        raise NotImplementedError(
            "`quantization_config` must announce dynamic scales of activations and keys that are not quantised, or "
            "`quantization` be 'fp8' to take the weights alone, with a scale of its own for each token. "
            f"Got {', '.join(announced.not_done)}."
        )


def refuse_announced(got: str) -> NoReturn:
    """Says what would be read.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "`quantization_config` must be absent, or announce weights in fp8 (e4m3) with a scale for each tensor, output "
        "channel or block, by quant_method fp8, fbgemm_fp8, compressed-tensors or modelopt, weights alone in int4 with "
        "a scale for each output channel or group of inputs, by awq, gptq or compressed-tensors, or experts by mxfp4: "
        f"load unquantised weights, or such ones. Got {got}."
    )


def refuse_order(got: str) -> NoReturn:
    """Says what would be read of groups whose inputs are not neighbours.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "`quantization_config` must announce groups of neighbouring inputs: act-order of groups is not built. Quantise "
        "with desc_act=false, or with static groups (static_groups=true of GPTQ, actorder='static' of "
        f"compressed-tensors), or load unquantised weights. Got {got}."
    )


def check_fields(given: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...] | None], where: str = "") -> None:
    """Checks that fields have values that are read.

    Args:
        allowed: By name; None takes any value.
        where: How the names are led in sentences.

    Raises:
        NotImplementedError: One has not.
    """
    for name, value in given.items():
        values = allowed.get(name, ())
        if values is not None and not any(value == each and type(value) is type(each) for each in values):
            refuse_announced(f"{where}{name}={value!r}")


def group_scales(
    packing: Packing, group_size: Any, *, symmetric: bool = False, name: str = "group_size"
) -> GroupScales:
    """The scales of groups of so many inputs; of -1, all.

    Args:
        name: What the size is called in sentences.

    Raises:
        NotImplementedError: It is no such number.
    """
    if type(group_size) is not int or (group_size < 1 and group_size != -1):
        refuse_announced(f"{name}={group_size!r}")
    return GroupScales(packing, None if group_size == -1 else group_size, symmetric)


def block_scales(block: Any, name: str) -> BlockScales:
    """The scales of blocks whose lengths are listed.

    Raises:
        NotImplementedError: It is no list of two lengths.
    """
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        refuse_announced(f"{name}={block!r}")
    return BlockScales(*block)
