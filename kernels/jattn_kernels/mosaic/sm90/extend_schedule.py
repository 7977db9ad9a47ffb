"""What is decided before extend's kernel runs: sizes of its tiles, and blocks of query tokens, the longest first."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jattn_kernels.mosaic.sm90.tiles import NUM_SMS, SHARED_MEMORY_BYTES, WGMMA_ROWS
from jattn_kernels.spec import AttentionSpec

COMPUTE_WARPGROUPS = 2  # that compute
_ENOUGH_ROWS = 56  # of 64 in use, rather than more heads in a tile
_OTHER_BYTES = 2048 + 512  # Mosaic's own for reductions, and more than all barriers take


@dataclasses.dataclass(frozen=True)
class ExtendTiles:
    """Sizes that the kernel is compiled for.

    Attributes:
        block_kv: Keys a tile.
        k_stages, v_stages: Tiles of k and of v in shared memory.
        blocks: Blocks that run at the same time, one an SM.
    """

    block_kv: int
    k_stages: int
    v_stages: int
    blocks: int = NUM_SMS

    @property
    def stages(self) -> tuple[int, int]:
        """Of k and of v."""
        return self.k_stages, self.v_stages

    def shared_memory_bytes(self, spec: AttentionSpec, itemsize: int) -> int:
        """Bytes of one block."""
        keys = self.block_kv * (self.k_stages * spec.head_dim + self.v_stages * spec.value_dim)
        staged = staged_columns(spec)
        held = -(-spec.head_dim // staged) * staged
        rows = COMPUTE_WARPGROUPS * WGMMA_ROWS * (held + staged)
        return itemsize * (keys + rows) + _OTHER_BYTES

    def refuses(self, spec: AttentionSpec, itemsize: int, page_size: int) -> str | None:
        """Why the kernel cannot be compiled for these sizes, or None."""
        if self.block_kv % 64 or min(self.stages) < 2:
            return f"Extend tiles take a multiple of 64 keys and at least 2 stages. Got {self}."
        if self.block_kv % page_size and page_size % self.block_kv:
            return f"A tile of {self.block_kv} keys cannot be made of pages of {page_size}."
        if self.shared_memory_bytes(spec, itemsize) > SHARED_MEMORY_BYTES:
            needed = self.shared_memory_bytes(spec, itemsize)
            return f"{self} needs {needed} bytes of shared memory at head_dim {spec.head_dim}; Hopper has 232448."
        return None


def choose_tiles(spec: AttentionSpec) -> ExtendTiles:
    """As many keys a tile as the registers of a warpgroup can hold scores and output for."""
    if spec.head_dim <= 64:
        return ExtendTiles(block_kv=128, k_stages=4, v_stages=4)
    if spec.head_dim <= 128:
        return ExtendTiles(block_kv=128, k_stages=3, v_stages=2)
    return ExtendTiles(block_kv=64, k_stages=2, v_stages=2)


def staged_columns(spec: AttentionSpec) -> int:
    """Columns of q and of the output that are in staging memory at once."""
    widest = max(spec.head_dim, spec.value_dim)
    return widest if widest <= 128 else 64


def heads_per_tile(group_size: int) -> int:
    """How many heads of a group share a tile's rows: the most that leave few rows empty."""
    most = WGMMA_ROWS // 2  # of one token a tile, Mosaic infers no layout
    fitting = [heads for heads in range(1, min(group_size, most) + 1) if group_size % heads == 0]
    return max(heads for heads in fitting if WGMMA_ROWS // heads * heads >= _ENOUGH_ROWS)


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtendSchedule:
    """What each block of the kernel does, for every head. Padded tokens have items too, without keys.

    Attributes:
        items: (sequence, first token, tokens, key tiles, keys that the first token sees by the causal rule, keys of
            the sequence) of each item; unused ones come last.
        num_items: How many are used.
        place: Where each token went: item * block_tokens + its number in the item.
        block_tokens: Query tokens an item; static.
        block_kv: Keys a tile; static.
    """

    items: Int[Array, "W 6"]
    num_items: Int[Array, "1"]
    place: Int[Array, " T"]
    block_tokens: int = dataclasses.field(metadata={"static": True})
    block_kv: int = dataclasses.field(metadata={"static": True})


def longest_first(
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    limit: Int[Array, " B"],
    *,
    num_tokens: int,
    causal: bool,
    block_tokens: int,
    block_kv: int,
) -> ExtendSchedule:
    """Items in the order of falling work, so that the last blocks to run are short.

    Args:
        limit: Keys that a request's first token sees by the causal rule; each next token sees one more.
        num_tokens: Rows of q, padded tokens included.
    """
    num_seqs = seq_lens.shape[0]
    # The padded tokens are one more request. A request wastes less than a block.
    bounds = jnp.concatenate([jnp.minimum(cu_q_lens, num_tokens), jnp.full(1, num_tokens, jnp.int32)])
    num_items = (num_tokens + min(num_seqs + 1, num_tokens) * (block_tokens - 1)) // block_tokens
    counts = -(-jnp.diff(bounds) // block_tokens)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = ends - counts

    item = jnp.arange(num_items, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(ends, item, side="right"), num_seqs).astype(jnp.int32)
    sequence = jnp.minimum(request, num_seqs - 1)
    row = (item - starts[request]) * block_tokens
    first = bounds[request] + row
    tokens = jnp.clip(bounds[request + 1] - first, 0, block_tokens)
    first_limit = limit[sequence] + row
    visible = seq_lens[sequence]
    if causal:
        visible = jnp.minimum(visible, first_limit + tokens - 1)
    has_keys = (request < num_seqs) & (tokens > 0) & (visible > 0)
    key_tiles = jnp.where(has_keys, -(-visible // block_kv), 0)
    order = jnp.argsort(jnp.where(tokens > 0, -key_tiles, 1), stable=True)
    items = jnp.stack([sequence, first, tokens, key_tiles, first_limit, seq_lens[sequence]], axis=1)[order]

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(bounds[1:-1], token, side="right").astype(jnp.int32)
    row = token - bounds[owner]
    position = jnp.argsort(order).astype(jnp.int32)[starts[owner] + row // block_tokens]
    return ExtendSchedule(
        items=items,
        num_items=jnp.sum(tokens > 0, dtype=jnp.int32, keepdims=True),
        place=position * block_tokens + row % block_tokens,
        block_tokens=block_tokens,
        block_kv=block_kv,
    )


def extend_schedule(
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    limit: Int[Array, " B"],
    *,
    spec: AttentionSpec,
    num_tokens: int,
    sizes: ExtendTiles,
) -> ExtendSchedule:
    """The work list of a step, the same for all layers of one kind; `limit` as `longest_first` takes it."""
    return longest_first(
        seq_lens,
        cu_q_lens,
        limit,
        num_tokens=num_tokens,
        causal=spec.causal,
        block_tokens=COMPUTE_WARPGROUPS * (WGMMA_ROWS // heads_per_tile(spec.group_size)),
        block_kv=sizes.block_kv,
    )
