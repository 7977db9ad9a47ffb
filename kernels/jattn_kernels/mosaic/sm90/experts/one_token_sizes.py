"""Sizes of the kernel of one token's mixture in mxfp4: what fits shared memory beside each other."""

import dataclasses

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.few_rows_sizes import FewRowsSizes, Registers, few_rows_sizes
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH
from jattn_kernels.mosaic.sm90.experts.one_token_units import OneTokenUnits
from jattn_kernels.mosaic.sm90.experts.warp_choice import ranked_width
from jattn_kernels.mxfp4 import GROUP

_CONSUMERS = 2
_OTHERS = 5  # stages of the products before and after
_MOST_STAGES, _LEAST_STAGES = 16, 4
_ITEM_BYTES, _WORD_BYTES, _ALIGNMENT = 2, 4, 1024
_BARRIER_BYTES = 512  # of some fifty barriers
_SHARED_BYTES = tiles.SHARED_MEMORY_BYTES - 1024 - tiles.REDUCTION_BYTES - _BARRIER_BYTES  # the driver has 1 KB
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
    assert call.routing is not None
    of_few_rows = few_rows_sizes(call)
    if of_few_rows is None or call.num_tokens != 1:
        return None
    (sizes, _), others = of_few_rows, _OTHERS if row else 0
    units = OneTokenUnits(per_token=call.per_token, hidden=call.units, steps=1)
    rows, choices = 1 + units.most_rows, call.per_token * WARPS * _WORD_BYTES
    beside = [
        rows * call.units * _ITEM_BYTES,
        rows * _WORD_BYTES,
        sizes.buffers * _CONSUMERS * WGMMA_ROWS * sizes.row_sums * _WORD_BYTES,
        *[choices] * 3,
    ]
    if row:
        beside += [
            others * DEPTH * WGMMA_ROWS * _ITEM_BYTES,
            TILED_ROWS * row * _ITEM_BYTES,
            call.units * _ITEM_BYTES,
            ranked_width(call.routing) * _WORD_BYTES,
        ]

    def fits(stages: int) -> bool:
        of_stages = [stages * WGMMA_ROWS * size for size in (sizes.groups * GROUP // 2, sizes.rows_of_scales)]
        return sum(map(_aligned, [*beside, *of_stages])) <= _SHARED_BYTES

    stages = next(filter(fits, range(_MOST_STAGES, _LEAST_STAGES - 1, -_CONSUMERS)), None)
    if stages is None:
        return None
    facts = {"stages": stages, "consumers": _CONSUMERS, "registers": _REGISTERS, "others": others}
    return OneTokenSizes(**{**dataclasses.asdict(sizes), **facts})


def _aligned(size: int) -> int:
    """What a buffer takes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
