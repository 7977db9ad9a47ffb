"""Work tiles of extend on the device: the kernel's operands, pipeline stages, and the rows of a warpgroup's tile."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.logits import LOG2E, base2_logits
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.extend.schedule import staged_pieces
from jattn_kernels.spec import AttentionSpec

_MASK_BITS = 32  # of a word
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)

Span = tuple[Literal["skip", "masked", "whole"], Any, Any]


class Operands(NamedTuple):
    """What the kernel reads; None where a call has no use for it.

    Attributes:
        k, v: Pages or rows, with a leading layer axis; the same array twice if it holds both.
        places: The page table, or where each sequence's rows begin.
        query_blocks, num_query_blocks, rows, order: Of the schedule; `rows.position` with slopes only.
        layer: Which layer of the pages.
        slopes: ALiBi's, of each row of a tile for each block of heads.
        logit_factor: Of the products of a sequence (or of all) and a key head.
        rotates: Angles that keys are rotated by, as `RotationTables`.
        row_factor: In place of it, of the products of a key head and each row of a query block's tiles, heads first.
        out_factor: Of a value head.
        mask: For each row of each tile a bit for each key, 32 keys a word, words first.
    """

    q: Any  # [T, N, columns]
    k: Any  # [L, P, page_size, K, H], or [L, S, K, H]
    v: Any  # [L, P, page_size, K, Hv], or [L, S, K, Hv]
    places: Any  # [B, max_pages], or [B + 1]
    query_blocks: Any  # [blocks, 6 to 8]
    num_query_blocks: Any  # [1]
    layer: Any  # [1]
    rows: Any = None
    slopes: Any = None  # [head blocks, 64]
    logit_factor: Any = None  # [B or 1, K]
    out_factor: Any = None  # [K]
    mask: Any = None  # [words, query blocks, 2, 64]
    row_factor: Any = None  # [K, query blocks, 2, 64]
    rotations: Any = None
    order: Any = None  # [query blocks * head blocks]


class WorkTile(NamedTuple):
    """What a block does at one time: a query block's fields, and the block of heads."""

    query_block: Any
    heads: Any
    sequence: Any
    first: Any
    tokens: Any
    end_tile: Any
    limit: Any
    kv_len: Any
    first_tile: Any = None
    leading_rows: Any = None

    @property
    def begin_tile(self) -> Any:
        """The first tile of keys."""
        return 0 if self.first_tile is None else self.first_tile

    def begun(self, done: Any) -> Any:
        """The number of tile 0 among all tiles of a block, of which `done` come before this work tile's."""
        return done if self.first_tile is None else done - self.first_tile

    def kv_head(self, spec: AttentionSpec, heads: int) -> Any:
        """The key head of all heads of a tile.

        Args:
            heads: Heads that share a tile's rows.
        """
        return lax.div(self.heads, spec.group_size // heads)

    def owns(self, tile: Any, block_kv: int) -> Any:
        """Whether all keys of a tile are the request's own; the last tile may have others, and one of leading rows."""
        owned = (tile + 1) * block_kv <= self.kv_len
        return owned if self.leading_rows is None else owned & (tile * block_kv >= self.leading_rows)


class Tiles(NamedTuple):
    """Tiles of keys or of values that one warpgroup fills for others, each in the place of the one `stages` before it.

    Attributes:
        smem: The places.
        full, empty: Barriers of each: the tile may be read; it may be overwritten.
    """

    smem: Any  # [stages, block_kv, width]
    full: Any  # [stages]
    empty: Any  # [stages]

    @property
    def stages(self) -> int:
        """How many places there are."""
        return self.smem.shape[0]

    def stage(self, step: Any) -> Any:
        """The place of a tile, which is numbered among all of a block."""
        return lax.rem(step, self.stages)


class TilePair(NamedTuple):
    """Tiles of keys, and of values."""

    keys: Tiles
    values: Tiles


def clear_unowned(values: Any, work_tile: WorkTile, tile: Any) -> None:
    """Clears the rows of a tile of values that are not the request's own."""
    block_kv, width = values.shape
    for row in range(0, block_kv, WGMMA_ROWS):
        for column in staged_pieces(width, WGMMA_ROWS):  # few registers: 64 x 64 at a time
            part = values.at[pl.ds(row, WGMMA_ROWS), pl.ds(column, WGMMA_ROWS)]
            key = tile * block_kv + row
            before = None if work_tile.leading_rows is None else work_tile.leading_rows - key
            tiles.zero_rows_from(part, work_tile.kv_len - key, before)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileRows:
    """What is known of the rows of a warpgroup's tile; None where no feature asks for it.

    Attributes:
        tile_tokens: Tokens that a tile has room for.
        tokens: Tokens that it has.
        limit: Keys that the first of them sees by the causal rule.
        first, end, position: Of each row, as in `KeyBounds`; None if `limit` tells.
        ranges: As in `RowBounds`.
        slope: ALiBi's, of each row.
        factor: Of all products.
        row_factor: Of the products of each row; times the scale it is not negative.
        mask: Where the rows' words are.
    """

    spec: AttentionSpec
    block_kv: int
    tile_tokens: int
    work_tile: WorkTile
    tokens: Any
    limit: Any
    first: Any = None
    end: Any = None
    position: Any = None
    ranges: Any = None
    slope: Any = None
    factor: Any = None
    row_factor: Any = None
    mask: Any = None

    @classmethod
    def load(cls, operands: Operands, work_tile: WorkTile, warpgroup: Any, kv_head: Any, **facts: Any) -> "TileRows":
        """Reads what memory holds of a tile's rows.

        Args:
            kv_head: Gives the key head of the work tile.
            facts: The other attributes.
        """
        if operands.rows is not None:
            for name in ("first", "end", "position"):
                ref = getattr(operands.rows, name)
                facts[name] = None if ref is None else _load(ref.at[work_tile.query_block, warpgroup])
            facts["ranges"] = [operands.rows.ranges[work_tile.query_block, warpgroup, number] for number in range(4)]
        if operands.slopes is not None:
            facts["slope"] = _load(operands.slopes.at[work_tile.heads])
        if operands.logit_factor is not None:
            of = jnp.minimum(work_tile.sequence, operands.logit_factor.shape[0] - 1)
            facts["factor"] = operands.logit_factor[of, kv_head(work_tile)]
        if operands.row_factor is not None:
            facts["row_factor"] = _load(operands.row_factor.at[kv_head(work_tile), work_tile.query_block, warpgroup])
        if operands.mask is not None:
            facts["mask"] = operands.mask.at[:, work_tile.query_block, warpgroup]
        return cls(work_tile=work_tile, **facts)

    @property
    def only_scaled(self) -> bool:
        """Whether a factor that is not negative is all that makes logits of products."""
        return self.spec.logits_soft_cap is None and self.slope is None and self.factor is None

    @property
    def is_negated(self) -> bool:
        """Whether products have the sign reversed, so that the largest may be taken before the scale is applied."""
        return self.only_scaled and self.row_factor is None and self.spec.scale < 0

    @property
    def scale(self) -> Any:
        """That factor over ln 2: one for all products, or of each row."""
        if self.row_factor is None:
            return abs(self.spec.scale) * LOG2E
        return self.row_factor * (self.spec.scale * LOG2E)

    def spans(self) -> list[Span]:
        """Spans of tiles, (what to do, first, end); "whole" where all rows see all keys, and the last is to skip."""
        work_tile, causal = self.work_tile, self.spec.causal
        # Masked or whole, logits are rounded differently: it must not depend on what other rows of a tile see.
        mask_all = self.mask is not None or self.spec.batch_invariant
        if self.ranges is not None:
            begin, whole_from, whole_to, end = self.ranges
            seen: list[Span] = [("masked", begin, whole_from), ("whole", whole_from, whole_to)]
            seen = [("masked", begin, end)] if mask_all else [*seen, ("masked", whole_to, end)]
            return [("skip", work_tile.first_tile, begin), *seen, ("skip", end, work_tile.end_tile)]
        # Keys that the tile's first and last token see.
        least = jnp.clip(self.limit, 0, work_tile.kv_len) if causal else work_tile.kv_len
        most = jnp.clip(self.limit + self.tokens - 1, 0, work_tile.kv_len) if causal else work_tile.kv_len
        end = jnp.where(self.tokens > 0, jnp.minimum(pl.cdiv(most, self.block_kv), work_tile.end_tile), 0)
        whole_to = jnp.minimum(lax.div(least, self.block_kv), end)
        seen = [("masked", 0, end)] if mask_all else [("whole", 0, whole_to), ("masked", whole_to, end)]
        return [*seen, ("skip", end, work_tile.end_tile)]

    def logits(self, products: jax.Array, tile: Any) -> jax.Array:
        """Logits over ln 2."""
        factor, slope, distance = self.factor, None, None
        if self.row_factor is not None:
            factor = self.spread(self.row_factor)
        if self.slope is not None:
            slope = self.spread(self.slope)
            position = self.limit - 1 + self._token() if self.position is None else self.position
            distance = self._column() - self.spread(position - tile * self.block_kv)
        return base2_logits(products, self.spec, factor=factor, slope=slope, distance=distance)

    def visible(self, tile: Any, mask: list[jax.Array] | None) -> jax.Array:
        """Which keys of a tile each row sees.

        Args:
            mask: What `mask_words` gave.
        """
        key, column = tile * self.block_kv, self._column()
        if self.end is None:
            if not self.spec.causal:
                return column < self.work_tile.kv_len - key
            return column < self.spread(jnp.minimum(self.limit + self._token(), self.work_tile.kv_len) - key)
        seen = column < self.spread(self.end - key)
        seen &= column >= self.spread(self.first - key)
        if mask is not None:
            word = self.spread(mask[0])
            for number in range(1, len(mask)):
                word = jnp.where(column < number * _MASK_BITS, word, self.spread(mask[number]))
            seen &= (lax.shift_right_logical(word, column & (_MASK_BITS - 1)) & 1) == 1
        return seen

    def mask_words(self, tile: Any) -> list[jax.Array] | None:
        """A tile's words of each row."""
        if self.mask is None:
            return None
        words = self.block_kv // _MASK_BITS
        return [_load(self.mask.at[tile * words + number]) for number in range(words)]

    def _column(self) -> jax.Array:
        shape = (WGMMA_ROWS, self.block_kv)
        return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)

    def _token(self) -> jax.Array:
        """The number of each row's token in the tile."""
        row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=_PER_ROW)
        return lax.rem(row, self.tile_tokens)

    def spread(self, of_rows: Any) -> Any:
        """A number of each row, or one for all, for every key."""
        if not jnp.ndim(of_rows):
            return of_rows
        return lax.broadcast_in_dim(of_rows, (WGMMA_ROWS, self.block_kv), [0])


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_PER_ROW, optimized=False)
