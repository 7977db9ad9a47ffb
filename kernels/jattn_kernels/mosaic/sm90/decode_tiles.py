"""Sizes of decode's tiles, chosen before its kernel is compiled."""

import dataclasses

from jattn_kernels.mosaic.sm90 import tiles
from jattn_kernels.mosaic.sm90.tiles import SHARED_MEMORY_BYTES, WGMMA_ROWS
from jattn_kernels.spec import AttentionSpec

_BLOCK_KV = 64
_ROWS_OF_TWO_BLOCKS = 32
_WGMMA_BYTES = 2  # of a number in a product
_TILES_A_PART = 16  # where results must not depend on the batch


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Sizes that the kernel is compiled for.

    Attributes:
        block_rows: Query rows of a block: tokens times group, a multiple of 8.
        block_kv: Keys a tile.
        stages: Tiles in shared memory.
        blocks_per_sm: Blocks that fit on an SM at the same time.
        tiles_a_part: How many tiles a part has where sequences are cut at multiples; None where they are cut evenly.
    """

    block_rows: int
    block_kv: int
    stages: int
    blocks_per_sm: int
    tiles_a_part: int | None = None

    def shared_memory_bytes(self, spec: AttentionSpec, kv_itemsize: int) -> int:
        """Bytes of one block."""
        width = value_columns(spec)
        tile = self.block_kv * (spec.head_dim + width)
        readied = tile if kv_itemsize < _WGMMA_BYTES else self.block_kv * spec.head_dim if spec.rope_theta else 0
        rows = self.block_rows * (2 * spec.head_dim + self.block_kv)
        floats = self.block_rows * (width + 1)
        if spec.rope_theta is not None:
            rows, floats = rows - self.block_rows * spec.head_dim, floats + 2 * self.block_rows * spec.head_dim
        return kv_itemsize * self.stages * tile + _WGMMA_BYTES * (readied + rows) + 4 * floats + tiles.RESERVED_BYTES


def choose_tiles(spec: AttentionSpec, kv_itemsize: int, num_tokens: int) -> DecodeTiles:
    """As many stages of 64 keys as let two blocks share an SM, or else one block have it.

    Args:
        kv_itemsize: Bytes of a number of a key or value.
        num_tokens: Query tokens a sequence.
    """
    rows = num_tokens * spec.group_size
    block_rows = min(rows + -rows % tiles.TILED_ROWS, WGMMA_ROWS)
    tiles_a_part = _TILES_A_PART if spec.batch_invariant else None
    # A warpgroup that holds more rows has no registers left for a neighbour.
    for blocks_per_sm, most_stages in ((2, 4), (1, 6)) if block_rows <= _ROWS_OF_TWO_BLOCKS else ((1, 6),):
        for stages in range(most_stages, 1, -1):
            sizes = DecodeTiles(block_rows, _BLOCK_KV, stages, blocks_per_sm, tiles_a_part)
            if sizes.shared_memory_bytes(spec, kv_itemsize) * blocks_per_sm <= SHARED_MEMORY_BYTES:
                return sizes
    raise AssertionError(f"no tiles fit {spec}")


def value_columns(spec: AttentionSpec) -> int:
    """Columns of a value in shared memory and in results: wgmma takes 64 at a time."""
    return spec.value_dim + -spec.value_dim % WGMMA_ROWS
