"""Quantization: how a checkpoint stores the weights of its projections, and the sentences for what is not read."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn


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
class Mxfp4:
    """Weights of experts in fp4 (e2m1) with a power of two for each 32 inputs; see `jattn_models.mxfp4`."""


Quantization = BlockScales | ChannelScales | Mxfp4


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
        "channel or block, by quant_method fp8, fbgemm_fp8, compressed-tensors or modelopt, or experts by mxfp4: load "
        f"unquantised weights, or such ones. Got {got}."
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


def block_scales(block: Any, name: str) -> BlockScales:
    """The scales of blocks whose lengths are listed.

    Raises:
        NotImplementedError: It is no list of two lengths.
    """
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        refuse_announced(f"{name}={block!r}")
    return BlockScales(*block)
