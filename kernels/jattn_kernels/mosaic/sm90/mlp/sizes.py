"""What the kernel of one token's MLP keeps in shared memory, and who does what."""

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import aligned_rows
from jattn_kernels.mosaic.sm90.mlp.compact_row import SUMMED
from jattn_kernels.mosaic.sm90.mlp.units import DEPTH, PARTS, SIDE

CONSUMERS = 4
BUFFERS = 2  # of a unit's sums
# As many as keep memory busy, and a whole number for each consumer. With 12 and 20 of them a layer of Llama-3-8B takes
# 1.5 us more on an H200: what blocks leave each other waits behind weights that nobody needs yet.
STAGES = 8
_ITEM_BYTES, _SUM_BYTES = 2, 4
assert STAGES % CONSUMERS == 0  # each stage is always one and the same consumer's
_OTHERS = 8 * 1024  # sums, what warpgroups tell each other, factors of rows, and alignment


def fits(longest_row: int, columns: int, group_size: int, *, zero_points: bool) -> bool:
    """Whether all of it does.

    Args:
        longest_row: Inputs of the products.
        columns: Of the token.
        group_size: Inputs that have a scale.
        zero_points: Whether groups have some.
    """
    rows = (longest_row + 2 * columns) * _ITEM_BYTES
    stage = SIDE * DEPTH // 2 + SIDE * (DEPTH // group_size) * _ITEM_BYTES
    if zero_points:
        rows += (longest_row + columns) // SUMMED * _SUM_BYTES
        stage += PARTS * aligned_rows(DEPTH // group_size, SIDE // PARTS) * (SIDE // PARTS)
    return rows + STAGES * stage + _OTHERS <= tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES
