"""The schedule of extend: tile sizes, and blocks of query tokens, the longest first; which heads when, in `order`."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.lowering.key_bounds import KeyBounds, depends_on_places, is_narrow
from jattn_kernels.lowering.token_bounds import token_bounds
from jattn_kernels.mosaic.sm90.common.tiles import SHARED_MEMORY_BYTES, WGMMA_ROWS, num_sms
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.mosaic.sm90.extend.order import by_groups_of_heads, key_heads_at_once
from jattn_kernels.mosaic.sm90.extend.rows import CONSUMER_WARPGROUPS, RowBounds, key_ranges, of_rows
from jattn_kernels.spec import AttentionSpec

_ENOUGH_ROWS = 56  # of 64 in use, rather than more heads in a tile
_STAGES = ((4, 4), (3, 3), (3, 2), (2, 2))  # of k and of v, the best first
_CONVERTED_STAGES = (
    (4, 4, 3),
    (4, 3, 2),
    (3, 3, 2),
    (3, 2, 2),
    (2, 2, 2),
    (2, 2, 1),
    (2, 1, 1),
)  # and of what is dequantised
_OTHER_BYTES = 2048 + 512  # Mosaic's own for reductions, and more than all barriers take


@dataclasses.dataclass(frozen=True)
class ExtendTiles:
    """Sizes that the kernel is compiled for.

    Attributes:
        block_kv: Keys a tile.
        k_stages, v_stages: Tiles of k and of v in shared memory, as they were copied.
        converted_stages: Tiles of those that are dequantised.
        blocks: Blocks that run at the same time, one an SM.
    """

    block_kv: int
    k_stages: int
    v_stages: int
    converted_stages: int = 0
    blocks: int = dataclasses.field(default_factory=num_sms)

    def shared_memory_bytes(self, spec: AttentionSpec, dtypes: ExtendDtypes) -> int:
        """Bytes of one block."""
        copied = self.block_kv * (self.k_stages * spec.head_dim + self.v_stages * spec.value_dim)
        converted = self.block_kv * self.converted_stages * (spec.value_dim + (spec.head_dim if dtypes.rotates else 0))
        rows = CONSUMER_WARPGROUPS * WGMMA_ROWS * (query_columns(spec, dtypes) + staged_query_columns(spec, dtypes))
        sizes = ((dtypes.kv, copied), (dtypes.product, converted), (dtypes.q, rows))
        return sum(dtype.itemsize * numbers for dtype, numbers in sizes) + _OTHER_BYTES

    def refuses(self, spec: AttentionSpec, dtypes: ExtendDtypes, page_size: int | None) -> str | None:
        """Why the kernel cannot be compiled for these sizes, or None."""
        if self.block_kv % 64 or min(self.k_stages, self.v_stages + self.converted_stages) < 2:
            return f"Extend tiles take a multiple of 64 keys and at least 2 stages. Got {self}."
        if page_size is not None and self.block_kv % page_size and page_size % self.block_kv:
            return f"A tile of {self.block_kv} keys cannot be made of pages of {page_size}."
        needed = self.shared_memory_bytes(spec, dtypes)
        if needed > SHARED_MEMORY_BYTES:
            return f"{self} needs {needed} bytes of shared memory at head_dim {spec.head_dim}; Hopper has 232448."
        return None


def choose_extend_tiles(spec: AttentionSpec, dtypes: ExtendDtypes) -> ExtendTiles:
    """As many keys a tile as the registers of a warpgroup can hold scores and output for, and as many stages as fit.

    The keys a tile do not depend on the dtype of the queries, which a schedule does not know.
    """
    widest = ExtendDtypes.widest(dtypes.kv.itemsize, spec)
    for block_kv in (128, 64) if spec.value_dim <= 128 else (64,):
        if _most_stages(spec, widest, block_kv) is not None:
            sizes = _most_stages(spec, dtypes, block_kv)
            assert sizes is not None, f"{dtypes} take more than {widest}"
            return sizes
    raise AssertionError(f"no tiles fit {spec}")


def _most_stages(spec: AttentionSpec, dtypes: ExtendDtypes, block_kv: int) -> ExtendTiles | None:
    for stages in _CONVERTED_STAGES if dtypes.dequantises else _STAGES:
        if block_kv > 64 and stages[-1] < 2:  # rather less keys a tile
            continue
        sizes = ExtendTiles(block_kv, *stages)
        if sizes.shared_memory_bytes(spec, dtypes) <= SHARED_MEMORY_BYTES:
            return sizes
    return None


def staged_columns(spec: AttentionSpec) -> int:
    """Columns of the output that are in staging memory at once: copies begin at multiples of 128 bytes."""
    return 128 if spec.head_dim == spec.value_dim == 128 else 64


def staged_pieces(columns: int, width: int) -> list[int]:
    """Where pieces of a row's columns begin; where they do not come out even, the last one overlaps the one before."""
    return [min(begin, columns - width) for begin in range(0, columns, width)]


def staged_query_columns(spec: AttentionSpec, dtypes: ExtendDtypes) -> int:
    """Columns of q that are in staging memory at once, for the same reason 128 of 8 bits."""
    return staged_columns(spec) if dtypes.q.itemsize > 1 else 128


def query_columns(spec: AttentionSpec, dtypes: ExtendDtypes) -> int:
    """Columns that a row of queries has in shared memory, so that the output that is staged can take their place."""
    staged = staged_columns(spec) * dtypes.out.itemsize // dtypes.q.itemsize
    return max(dtypes.query_columns(spec.head_dim), staged)


def heads_per_tile(group_size: int) -> int:
    """How many heads of a group share a tile's rows: the most that leave few rows empty."""
    most = WGMMA_ROWS // 2  # of one token a tile, Mosaic infers no layout
    fitting = [heads for heads in range(1, min(group_size, most) + 1) if group_size % heads == 0]
    return max(heads for heads in fitting if WGMMA_ROWS // heads * heads >= _ENOUGH_ROWS)


def tokens_per_query_block(heads: int) -> int:
    """Query tokens that a query block has room for, where so many heads share a tile's rows."""
    return CONSUMER_WARPGROUPS * (WGMMA_ROWS // heads)


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtendSchedule:
    """What each block of the kernel does, for every head. Padded tokens have query blocks too, without keys.

    Attributes:
        query_blocks: (sequence, first token, tokens, end of the key tiles, keys that the first token sees by the causal
            rule, keys of the sequence) of each, and if it has `rows` its first key tile, and if keys are not paged the
            leading rows, which are the sequence before's and counted with them; unused ones come last.
        num_query_blocks: How many are used.
        place: Where each token went: query block * block_tokens + its number in the query block.
        rows: None if each token sees all keys, or one more than the token before it.
        order: As `by_groups_of_heads` gives it; None if all heads of a query block follow each other.
        block_tokens: Query tokens a query block; static.
        block_kv: Keys a tile; static.
    """

    query_blocks: Int[Array, "W fields"]
    num_query_blocks: Int[Array, "1"]
    place: Int[Array, " T"]
    rows: RowBounds | None
    order: Int[Array, " tiles"] | None = None
    block_tokens: int = dataclasses.field(metadata={"static": True})
    block_kv: int = dataclasses.field(metadata={"static": True})


def extend_schedule(
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    options: AttentionOptions,
    *,
    spec: AttentionSpec,
    num_tokens: int,
    sizes: ExtendTiles,
    leading_rows: Int[Array, " B"] | None = None,
) -> ExtendSchedule:
    """The work list of a step, the same for all layers of one kind.

    Args:
        options: Where queries and keys are, and whether a mask says what they see.
        num_tokens: Rows of q, padded tokens included.
        leading_rows: As in `token_bounds`; None if keys are paged.
    """
    q_start, kv_start = options.starts(seq_lens, jnp.diff(cu_q_lens))
    bounds = None
    if leading_rows is not None or _has_rows(spec, options):
        bounds = token_bounds(seq_lens, cu_q_lens, options, spec, num_tokens, leading_rows)
    schedule = longest_first(
        seq_lens,
        cu_q_lens,
        q_start - kv_start + 1,
        bounds,
        leading_rows,
        spec=spec,
        num_tokens=num_tokens,
        block_kv=sizes.block_kv,
    )
    return _in_order(schedule, spec, sizes, num_seqs=seq_lens.shape[0], num_tokens=num_tokens)


def _in_order(
    schedule: ExtendSchedule, spec: AttentionSpec, sizes: ExtendTiles, *, num_seqs: int, num_tokens: int
) -> ExtendSchedule:
    """The same with the order of its work tiles, where it is not that of its query blocks."""
    work_tiles_per_head = spec.group_size // heads_per_tile(spec.group_size)
    heads = key_heads_at_once(
        spec.num_kv_heads,
        work_tiles_per_head=work_tiles_per_head,
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        block_tokens=schedule.block_tokens,
        block_kv=schedule.block_kv,
        blocks=sizes.blocks,
    )
    if heads == spec.num_kv_heads:
        return schedule
    order = by_groups_of_heads(
        schedule.num_query_blocks,
        most=schedule.query_blocks.shape[0],
        head_blocks=spec.num_kv_heads * work_tiles_per_head,
        at_once=heads * work_tiles_per_head,
    )
    return dataclasses.replace(schedule, order=order)


def is_own(spec: AttentionSpec, options: AttentionOptions) -> bool:
    """Whether a call needs another work list than its lengths alone would give."""
    moved = options.q_start is not None or options.q_positions is not None
    biased = options.alibi_slopes is not None and moved
    return depends_on_places(spec, options) or options.custom_mask is not None or biased


def _has_rows(spec: AttentionSpec, options: AttentionOptions) -> bool:
    narrow = is_narrow(spec) or spec.window_right is not None
    placed = options.q_positions is not None and (spec.causal or options.alibi_slopes is not None)
    return narrow or placed or options.custom_mask is not None


def longest_first(
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    limit: Int[Array, " B"],
    bounds: KeyBounds | None,
    leading_rows: Int[Array, " B"] | None,
    *,
    spec: AttentionSpec,
    num_tokens: int,
    block_kv: int,
) -> ExtendSchedule:
    """Items in the order of falling work, so that the last blocks to run are short.

    Args:
        limit: Keys that a request's first token sees by the causal rule; each next token sees one more.
        bounds: The keys of each token; None if `limit` and the causal rule tell.
        leading_rows: As in `token_bounds`.
        num_tokens: Rows of q, padded tokens included.
    """
    num_seqs, heads = seq_lens.shape[0], heads_per_tile(spec.group_size)
    block_tokens = tokens_per_query_block(heads)
    # The padded tokens are one more request. A request wastes less than a block.
    offsets = jnp.concatenate([jnp.minimum(cu_q_lens, num_tokens), jnp.full(1, num_tokens, jnp.int32)])
    num_query_blocks = (num_tokens + min(num_seqs + 1, num_tokens) * (block_tokens - 1)) // block_tokens
    counts = -(-jnp.diff(offsets) // block_tokens)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = ends - counts

    query_block = jnp.arange(num_query_blocks, dtype=jnp.int32)
    request = jnp.minimum(_owner(ends, query_block), num_seqs)
    sequence = jnp.minimum(request, num_seqs - 1)
    row = (query_block - starts[request]) * block_tokens
    first = offsets[request] + row
    tokens = jnp.clip(offsets[request + 1] - first, 0, block_tokens)
    first_limit = limit[sequence] + row
    fields, rows = [sequence, first, tokens], None
    if bounds is not None:
        ranges = key_ranges(bounds, first, tokens, block_tokens=block_tokens, block_kv=block_kv)
        key_tiles = ranges.end - ranges.first
        kv_len = seq_lens[sequence] if leading_rows is None else (seq_lens + leading_rows)[sequence]
        fields += [ranges.end, first_limit, kv_len, ranges.first]
        fields += [] if leading_rows is None else [leading_rows[sequence]]
        by_row = functools.partial(of_rows, first_token=first, block_tokens=block_tokens, heads=heads)
        rows = RowBounds(*map(by_row, bounds), ranges=ranges.tiles)
    else:
        visible = seq_lens[sequence]
        if spec.causal:
            visible = jnp.minimum(visible, first_limit + tokens - 1)
        has_keys = (request < num_seqs) & (tokens > 0) & (visible > 0)
        key_tiles = jnp.where(has_keys, -(-visible // block_kv), 0)
        fields += [key_tiles, first_limit, seq_lens[sequence]]
    order = jnp.argsort(jnp.where(tokens > 0, -key_tiles, 1), stable=True)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = _owner(offsets[1:-1], token)
    row = token - offsets[owner]
    position = jnp.argsort(order).astype(jnp.int32)[starts[owner] + row // block_tokens]
    return ExtendSchedule(
        query_blocks=jnp.stack(fields, axis=1)[order],
        num_query_blocks=jnp.sum(tokens > 0, dtype=jnp.int32, keepdims=True),
        place=position * block_tokens + row % block_tokens,
        rows=jax.tree.map(lambda of_items: of_items[order], rows),
        block_tokens=block_tokens,
        block_kv=block_kv,
    )


def _owner(ends: Int[Array, " n"], at: Int[Array, " m"]) -> Int[Array, " m"]:
    """How many of the rising `ends` are not above each number; one kernel, where a search would be a loop of them."""
    return jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)
