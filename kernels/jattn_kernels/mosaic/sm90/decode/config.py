"""Configuration, operands and shared memory of the decode kernel."""

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import PageCopies
from jattn_kernels.mosaic.sm90.decode.tile_sizes import DecodeTiles, turns_values, value_columns
from jattn_kernels.spec import AttentionSpec

_NARROW_TILE_COLUMNS = 128  # of 8-bit values


def turns(spec: AttentionSpec, kv_dtype: Any, sizes: DecodeTiles) -> bool:
    """Whether values are dequantised into registers, from which wgmma takes them; the interpreter cannot."""
    can = turns_values(spec, kv_dtype.itemsize, sizes.block_rows, latent=sizes.latent)
    return can and tiles.interpret_params() is None


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The static facts of one kernel.

    Attributes:
        num_tokens: Query tokens a sequence, `group_size` rows each.
        row_blocks: Blocks of rows of a head.
        heads_per_block: Heads that share one block of 8 rows; each computes all of it.
        dtype: Of queries, keys and values unless they are fp8, and of the probabilities.
        kv_dtype: Of keys and values in shared memory.
        out_dtype: Of the output.
        q_parts: How many numbers of fp8 stand for one of a query, where its products with keys are of fp8.
        whole_queries: Whether queries come as they are, and become sums of fp8 numbers in the kernel.
        packed: Whether latents are packed, and converted on their way into shared memory.
        projected: Whether queries, and the tokens' keys and values, are made of what a projection leaves.
    """

    spec: AttentionSpec
    sizes: DecodeTiles
    page_size: int
    num_tokens: int
    row_blocks: int
    heads_per_block: int
    dtype: Any
    kv_dtype: Any
    out_dtype: Any
    q_parts: int = 1
    whole_queries: bool = False
    packed: bool = False
    projected: bool = False

    @property
    def rows(self) -> int:
        """Rows that a block of one head has of its own."""
        return self.sizes.block_rows // self.heads_per_block

    def rows_of_block(self, head: Any, row_block: Any) -> Any:
        """Among the rows of all heads those of one block."""
        block = lax.div(head, self.heads_per_block) * self.row_blocks + row_block
        return pl.ds(block * self.sizes.block_rows, self.sizes.block_rows)

    @property
    def width(self) -> int:
        """Columns of a value in shared memory and in results."""
        return value_columns(self.spec)

    @property
    def dequantises(self) -> bool:
        """Whether tiles of values are dequantised before their products, and those of keys if they are rotated too."""
        return self.kv_dtype != self.dtype and not self.turns

    @property
    def turns(self) -> bool:
        """As the function of this name."""
        return turns(self.spec, self.kv_dtype, self.sizes)

    @property
    def stacks(self) -> bool:
        """Whether the parts of queries are columns of one product, whose sums are added up after it."""
        return self.q_parts > 1 and self.turns

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are rotated before their product."""
        return self.spec.rope_theta is not None

    @property
    def q_copies(self) -> int:
        """Copies that bring a work tile's queries: one, or one a part where rows are wider than a tile's, or lie apart.

        A copy has five axes at most.
        """
        if self.sizes.latent and not self.dequantises:
            return 2 * self.sizes.block_rows // tiles.TILED_ROWS
        if self.whole_queries:
            return 1
        return self.q_parts if self.stacks or self.spec.head_dim > _NARROW_TILE_COLUMNS else 1

    @property
    def copies(self) -> PageCopies:
        most_rows = tiles.TILED_ROWS if self.width > self.spec.value_dim else None
        if self.sizes.latent:
            most_rows = self.sizes.block_kv // tiles.WARPS  # rows are wide: a copy for each warp to start
        return PageCopies.of(self.spec, self.sizes.block_kv, self.page_size, most_rows)


class Operands(NamedTuple):
    """What the kernel reads; None where a call has no use for it.

    Attributes:
        q: The rows of one kv head after another, each token by token, [B, parts, rows, H]; each is the sum of its
            parts. A head's rows fill whole blocks of rows, or several heads share one block.
        q_pe: Of latents that are not in fp8 the last columns of the rows, which `q` then lacks.
        k_pages, v_pages: With a leading layer axis; the same array twice if it holds both, and the keys alone if a
            value is the beginning of its key.
        layer: Which layer of the pages.
        work_tiles, workers: Of the schedule.
        first, end, position: Bounds of the keys that queries see, and their own numbers: of each sequence if it has
            one token, of each row of a head if several. Of one token, `end` is in the schedule.
        slopes: ALiBi's, of each row of all heads.
        sinks: Logits that count in the denominator alone, likewise, of all layers if of more than one.
        logit_factor: Of the products of a sequence (or of all) and a head.
        out_factor: Of a head's output.
        mask: For each key of a sequence a bit for each token that sees it.
        tile_rotations: Of a rotary embedding the angles' cosine and sine for the first key of each tile. The queries
            are then rotated by their own numbers, float32, and [B, blocks of rows, H, rows].
        key_rotations: The same for each key of any tile, by its number there.
        heads: Of one token a sequence, a `TokenHeads` that queries, keys and values are made of, in place of `q`. The
            keys and values are written into the pages, which are Refs.
        slots: Where to; of each sequence.
    """

    q: Any  # [B, parts, rows, H]; rotated: float32 [B, row blocks, H, block_rows]
    k_pages: Any  # [L, P, page_size, K, H], or as the layout has it
    v_pages: Any  # [L, P, page_size, K, Hv]
    page_table: Any  # [B, max_pages]
    layer: Any  # [1]
    work_tiles: Any  # [W, 5]
    workers: Any  # [workers, 7]
    q_pe: Any = None  # [B, rows, R]
    first: Any = None  # [B], or [B, rows of a head]
    end: Any = None  # [B, rows of a head]
    position: Any = None  # [B], or [B, rows of a head]
    slopes: Any = None  # [rows of all heads]
    sinks: Any = None  # [L or 1, rows of all heads]
    logit_factor: Any = None  # [B or 1, K]
    out_factor: Any = None  # [K]
    mask: Any = None  # [B, keys]
    tile_rotations: Any = None  # float32 [tiles, H / 2] each
    key_rotations: Any = None  # float16 [block_kv, H / 2] each
    heads: Any = None
    slots: Any = None  # [B]


class SharedMemory(NamedTuple):
    """Shared memory and barriers of a block; what is of each consumer warpgroup has them as its first axis.

    Attributes:
        q: Two work tiles' queries.
        q_split: Of queries that come whole: the parts, and what each row of them is to be multiplied with.
        pages: `stages` tiles of keys, and of values; of keys alone if they hold the values. So are barriers.
        converted: A `Converted` of each consumer warpgroup.
        p: Probabilities of each consumer warpgroup.
        partials: Output and logarithm of the sum of each consumer warpgroup but the first; None if it is alone.
        result: Output and lse of a work tile.
        q_full, q_empty: producer -> consumer: a work tile's q has arrived; back: is no longer needed.
        full: producer -> consumer, of keys and of values: the copies of a tile have arrived.
        empty: consumer -> producer, of keys and of values: the tile may be overwritten.
        partials_full, partials_empty: Of `partials`, between the first consumer warpgroup and each other one.
    """

    q: Any  # [2, parts, block_rows, H]; rotated: float32 [2, H, block_rows]
    q_split: Any  # [warpgroups, parts * block_rows, H], float32 [warpgroups, block_rows]
    pages: Any  # [stages, block_kv, H], [stages, block_kv, Hv]
    converted: Any  # [warpgroups, ...] each
    p: Any  # [warpgroups, block_rows, block_kv]
    partials: Any  # [warpgroups - 1, Hv, block_rows], [warpgroups - 1, block_rows]
    result: Any  # [block_rows, Hv], [block_rows]
    q_full: Any  # [2]
    q_empty: Any  # [2]
    full: Any  # [stages] each
    empty: Any  # [stages] each
    partials_full: Any  # [warpgroups - 1]
    partials_empty: Any  # [warpgroups - 1]
