"""Sizes of decode's tiles, chosen before its kernel is compiled."""

import dataclasses
from collections.abc import Iterator

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import SHARED_MEMORY_BYTES, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.turned_values import COLUMNS as TURNED_COLUMNS
from jattn_kernels.mosaic.sm90.decode.autotuned import VARIABLE, Arrangement, Shape, tuned
from jattn_kernels.spec import AttentionSpec

_BLOCK_KV = 64
_FEW_ROWS = 16
_WGMMA_BYTES = 2  # of a number in a product
_MOST_Q_BYTES, _LATENT_Q_BYTES = 4, 2  # of a query's number: float32, or up to four of 8 bits; two for latents
_MOST_STAGES = {1: 4, 2: 8, 3: 9}  # for so many consumer warpgroups
_MOST_TURNED = 3  # of tiles whose values wgmma takes from registers: with a fourth all copies arrive later
_TILES_PER_SPLIT = 16  # where results must not depend on the batch


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Sizes that the kernel is compiled for.

    Attributes:
        block_rows: Query rows of a block: tokens times group, a multiple of 8.
        block_kv: Keys a tile.
        stages: Tiles in shared memory, a multiple of `warpgroups`.
        blocks_per_sm: Blocks that fit on an SM at the same time.
        warpgroups: Consumers, which alternate between the tiles of a work tile.
        tiles_per_split: Tiles of a split where sequences are cut at multiples of them; None where they are cut evenly.
        latent: Whether a value is the beginning of its key, in the same memory.
    """

    block_rows: int
    block_kv: int
    stages: int
    blocks_per_sm: int
    warpgroups: int = 1
    tiles_per_split: int | None = None
    latent: bool = False

    def shared_memory_bytes(self, spec: AttentionSpec, kv_itemsize: int) -> int:
        """Bytes of one block."""
        width, dim, rotates = value_columns(spec), spec.head_dim, spec.rope_theta is not None
        is_narrow = kv_itemsize < _WGMMA_BYTES
        dequantises = is_narrow and not turns_values(spec, kv_itemsize, self.block_rows, latent=self.latent)
        copied = kv_itemsize * self.stages * self.block_kv * (dim if self.latent else dim + width)
        most_q_bytes = _LATENT_Q_BYTES if self.latent else _MOST_Q_BYTES
        queries = 2 * self.block_rows * dim * (most_q_bytes if rotates or is_narrow else _WGMMA_BYTES)
        # Of each consumer warpgroup: probabilities, and what is converted.
        own = self.block_rows * self.block_kv + (self.block_rows * dim if rotates else 0)
        own += (self.block_kv * dim if rotates else 0) + (self.block_kv * width if dequantises else 0)
        results = 4 * self.block_rows * (width + 1 + (self.warpgroups - 1) * (width + 2))
        reductions = self.warpgroups * tiles.REDUCTION_BYTES
        return copied + queries + _WGMMA_BYTES * self.warpgroups * own + results + reductions + tiles.RESERVED_BYTES


def choose_decode_tiles(spec: AttentionSpec, kv_itemsize: int, num_tokens: int, *, latent: bool = False) -> DecodeTiles:
    """Sizes found on this GPU by trying them, if they are told; else the best by rule that fit.

    As many stages of 64 keys as let two blocks share an SM, or one block have it, with some consumer warpgroups.

    Args:
        kv_itemsize: Bytes of a number of a key or value.
        num_tokens: Query tokens a sequence.
        latent: As in `DecodeTiles`.

    Raises:
        ValueError: Sizes that were told cannot be read, or do not fit.
    """
    block_rows = _most_rows(spec, num_tokens)
    while True:
        shape = shape_of(spec, kv_itemsize, block_rows)
        told = tuned(shape)
        if told is not None:
            sizes = _arranged(spec, block_rows, told, latent=latent)
            if told.stages % told.warpgroups or not _fits(sizes, spec, kv_itemsize):
                raise ValueError(f"Sizes that ${VARIABLE} tells do not fit a GPU of Hopper. Got {told} for {shape}.")
            return sizes
        for arrangement in _by_rule(spec, kv_itemsize, block_rows, latent=latent):
            sizes = _arranged(spec, block_rows, arrangement, latent=latent)
            if _fits(sizes, spec, kv_itemsize):
                return sizes
        assert block_rows > tiles.TILED_ROWS, f"no tiles fit {spec}"
        block_rows = max(tiles.TILED_ROWS, block_rows // 2 // tiles.TILED_ROWS * tiles.TILED_ROWS)


def shape_of(spec: AttentionSpec, kv_itemsize: int, block_rows: int) -> Shape:
    """What a choice of sizes depends on."""
    return Shape(block_rows, spec.head_dim, spec.value_dim, kv_itemsize, spec.rope_theta is not None)


def arrangements(spec: AttentionSpec, kv_itemsize: int, block_rows: int) -> list[Arrangement]:
    """All that fit, for a search."""
    every = (
        Arrangement(stages, blocks_per_sm, warpgroups)
        for blocks_per_sm, warpgroups in ((2, 1), (1, 1), (1, 2), (1, 3))
        for stages in range(_MOST_STAGES[warpgroups], 1, -1)
        if stages % warpgroups == 0
    )
    return [one for one in every if _fits(_arranged(spec, block_rows, one), spec, kv_itemsize)]


def _by_rule(spec: AttentionSpec, kv_itemsize: int, block_rows: int, *, latent: bool) -> Iterator[Arrangement]:
    """Arrangements of blocks of so many rows, the best ones first."""
    turned = turns_values(spec, kv_itemsize, block_rows, latent=latent)
    if block_rows > _FEW_ROWS or spec.rope_theta is not None:
        blocks = ((1, 2), (1, 1))
    elif kv_itemsize < _WGMMA_BYTES and not turned:
        blocks = ((1, 3), (1, 2), (1, 1))
    else:  # All that there is to do is to attend few rows: one warpgroup keeps up with the memory.
        blocks = ((2, 1), (1, 1))
    for blocks_per_sm, warpgroups in blocks:
        for stages in range(_MOST_TURNED if turned else _MOST_STAGES[warpgroups], 1, -warpgroups):
            yield Arrangement(stages, blocks_per_sm, warpgroups)


def _arranged(spec: AttentionSpec, block_rows: int, arrangement: Arrangement, *, latent: bool = False) -> DecodeTiles:
    stages, blocks_per_sm, warpgroups = arrangement
    tiles_per_split = _TILES_PER_SPLIT if spec.batch_invariant else None
    return DecodeTiles(block_rows, _BLOCK_KV, stages, blocks_per_sm, warpgroups, tiles_per_split, latent)


def _fits(sizes: DecodeTiles, spec: AttentionSpec, kv_itemsize: int) -> bool:
    return sizes.shared_memory_bytes(spec, kv_itemsize) * sizes.blocks_per_sm <= SHARED_MEMORY_BYTES


def _most_rows(spec: AttentionSpec, num_tokens: int) -> int:
    """Rows of a block that has all of a head's, or as many as it may."""
    rows = num_tokens * spec.group_size
    return min(rows + -rows % tiles.TILED_ROWS, WGMMA_ROWS)


def turns_values(spec: AttentionSpec, kv_itemsize: int, block_rows: int, *, latent: bool = False) -> bool:
    """Whether wgmma takes values of 8 bits from registers, so that they need no room but as they were copied."""
    is_plain = not latent and spec.rope_theta is None and spec.value_dim == TURNED_COLUMNS
    return is_plain and kv_itemsize < _WGMMA_BYTES and block_rows <= _FEW_ROWS


def value_columns(spec: AttentionSpec) -> int:
    """Columns of a value in shared memory and in results: wgmma takes 64 at a time."""
    return spec.value_dim + -spec.value_dim % WGMMA_ROWS
