"""Sizes of the kernel of one token's mixture in mxfp4: what fits shared memory beside each other."""

import dataclasses

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.few_rows_sizes import FewRowsSizes, Registers, few_rows_sizes
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH
from jattn_kernels.mosaic.sm90.experts.one_token_units import HALVES, OneTokenUnits
from jattn_kernels.mxfp4 import GROUP

_CONSUMERS = 2
_OTHERS = 5  # stages of the products before and after
_MOST_STAGES, _LEAST_STAGES = 16, 4
_ITEM_BYTES, _SUM_BYTES = 2, 4
_CHOICE_BYTES = 1024  # of what is chosen, of barriers, and of what rows are multiplied with
# No more than the launch gives, 128 a thread of four warpgroups.
_REGISTERS = Registers(consumer=120, last=208, producer=40)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneTokenSizes(FewRowsSizes):
    """Of experts' products, and of those before and after.

    Attributes:
        others: Stages of the latter; 0 where there are none.
    """

    others: int


def one_token_sizes(call: ExpertsCall, row: int) -> OneTokenSizes | None:
    """Those of a token; None where it does not fit.

    Args:
        row: Numbers of the longest row of the products before and after; 0 where there are none.
    """
    of_few_rows = few_rows_sizes(call)
    if of_few_rows is None or call.num_tokens != 1:
        return None
    (sizes, _), others = of_few_rows, _OTHERS if row else 0
    units = OneTokenUnits(per_token=call.per_token, hidden=call.units, steps=1)
    rows = (1 + units.most_rows) * call.units * _ITEM_BYTES
    sums = HALVES * _CONSUMERS * WGMMA_ROWS * sizes.row_sums * _SUM_BYTES
    of_others = (
        others * DEPTH * WGMMA_ROWS * _ITEM_BYTES + (TILED_ROWS * row + (call.units if row else 0)) * _ITEM_BYTES
    )
    left = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - tiles.REDUCTION_BYTES - _CHOICE_BYTES
    stage = (sizes.groups * GROUP // 2 + sizes.rows_of_scales) * WGMMA_ROWS
    stages = min(_MOST_STAGES, (left - rows - sums - of_others) // stage) // _CONSUMERS * _CONSUMERS
    if stages < _LEAST_STAGES:
        return None
    facts = {"stages": stages, "consumers": _CONSUMERS, "registers": _REGISTERS, "others": others}
    return OneTokenSizes(**{**dataclasses.asdict(sizes), **facts})
