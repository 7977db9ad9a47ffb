"""Quantization: how a checkpoint stores the weights of its projections, as config.json announces it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

_BUILT = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
# The tensors themselves say which are quantised; activations are not rounded here, so neither are their scales.
_UNREAD = ("modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize")


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """Weights in fp8 (e4m3) with a factor for each block (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    Attributes:
        rows, columns: Of a block, along the last two axes of a tensor as it is stored; the last ones may have fewer.
    """

    rows: int
    columns: int

    def block(self, rank: int) -> tuple[int, ...]:
        """The lengths of a block along the axes of a tensor of so many."""
        return ((1,) * rank + (self.rows, self.columns))[-rank:]


def read_quantization(fields: Mapping[str, Any]) -> BlockScales | None:
    """What `quantization_config` says; None where the weights are not quantised.

    Args:
        fields: Without nulls.

    Raises:
        NotImplementedError: It announces something else than fp8 with a scale for each block.
    """
    announced = fields.get("quantization_config")
    if not announced:
        return None
    if not isinstance(announced, Mapping):
        raise NotImplementedError(f"{_SENTENCE} Got {announced!r}.")
    given = {"fmt": "e4m3", "activation_scheme": "dynamic", "quant_method": None, "weight_block_size": None}
    given |= {name: value for name, value in announced.items() if value is not None and name not in _UNREAD}
    block = given.pop("weight_block_size")
    for name, value in given.items():
        if value != _BUILT.get(name):
            raise NotImplementedError(f"{_SENTENCE} Got {name}={value!r}.")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise NotImplementedError(f"{_SENTENCE} Got weight_block_size={block!r}.")
    return BlockScales(*block)


_SENTENCE = (
    "`quantization_config` must be absent, or announce fp8 with a scale for each block (quant_method='fp8', "
    "fmt='e4m3', activation_scheme='dynamic', weight_block_size=[128, 128]): load unquantised weights, or such ones."
)
