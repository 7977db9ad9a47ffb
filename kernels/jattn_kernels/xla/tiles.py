"""Queries cut into tiles of equal size, each of one request."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MIN_TILE_ROWS, MAX_TILE_ROWS = 8, 64


class QueryTiles(NamedTuple):
    """W tiles of R rows; rows that are not `valid` belong to no query and see nothing.

    Attributes:
        q: Queries; anything, NaN included, where not valid.
        request: The request that a tile belongs to.
        row: A row's number i within its request.
        position: A row's absolute position.
        valid: Whether the row is a query.
    """

    q: Float[Array, "W R N H"]
    request: Int[Array, " W"]
    row: Int[Array, "W R"]
    position: Int[Array, "W R"]
    valid: Bool[Array, "W R"]


def decode_tiles(
    q: Float[Array, "B Q N H"], q_start: Int[Array, " B"], q_positions: Int[Array, "B Q"] | None
) -> QueryTiles:
    """One tile a sequence."""
    num_seqs, rows = q.shape[:2]
    row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[None], (num_seqs, rows))
    position = q_start[:, None] + row if q_positions is None else q_positions
    request = jnp.arange(num_seqs, dtype=jnp.int32)
    return QueryTiles(q, request, row, position, jnp.ones((num_seqs, rows), bool))


def tile_rows(num_tokens: int, num_seqs: int) -> int:
    """Rows a tile: near the mean length of a request, so that short requests do not leave tiles mostly empty."""
    mean = max(1, num_tokens // num_seqs)
    return min(max(MIN_TILE_ROWS, 1 << (mean - 1).bit_length()), MAX_TILE_ROWS)


def extend_tiles(
    q: Float[Array, "T N H"],
    cu_q_lens: Int[Array, " B_plus_1"],
    q_start: Int[Array, " B"],
    q_positions: Int[Array, " T"] | None,
) -> tuple[QueryTiles, Int[Array, " T"]]:
    """Tiles of ragged queries, and where token t went: tile * R + row, or W * R for a padded token.

    The number of tiles is a static bound, ceil(T / R) + B; those left over have no valid row.
    """
    num_tokens, num_seqs = q.shape[0], q_start.shape[0]
    rows = tile_rows(num_tokens, num_seqs)
    num_tiles = -(-num_tokens // rows) + num_seqs
    tiles_of = -(-jnp.diff(cu_q_lens) // rows)
    ends = jnp.cumsum(tiles_of, dtype=jnp.int32)
    starts = ends - tiles_of

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), num_seqs - 1).astype(jnp.int32)
    first_row = (tile - starts[request]) * rows
    row = first_row[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    token = cu_q_lens[request][:, None] + row
    valid = (token < cu_q_lens[request + 1][:, None]) & (token < num_tokens)
    token = jnp.clip(token, 0, num_tokens - 1)
    position = q_start[request][:, None] + row if q_positions is None else q_positions[token]
    tiles = QueryTiles(q[token], request, row, position, valid)

    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], tokens, side="right"), num_seqs - 1)
    place = starts[owner] * rows + tokens - cu_q_lens[owner]
    return tiles, jnp.where(tokens < cu_q_lens[-1], place, num_tiles * rows).astype(jnp.int32)
