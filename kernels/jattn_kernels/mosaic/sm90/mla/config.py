"""Configuration, operands and shared memory of the latent kernel."""

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS, PageCopies
from jattn_kernels.packed_latents import is_packed
from jattn_kernels.spec import AttentionSpec

BLOCK_ROWS = WGMMA_ROWS
BLOCK_KV = 64
CONSUMERS = 2  # warpgroups
PAIR = CONSUMERS * BLOCK_KV  # keys


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """The static facts of one kernel.

    Attributes:
        num_tokens: Query tokens a sequence, `num_q_heads` rows each.
        dtype: Of queries, probabilities, and latents in shared memory.
        kv_dtype: Of latents in pages.
    """

    spec: AttentionSpec
    page_size: int
    num_tokens: int
    dtype: Any
    kv_dtype: Any

    @property
    def row_blocks(self) -> int:
        """Blocks of rows of a sequence."""
        return -(-self.num_tokens * self.spec.num_q_heads // BLOCK_ROWS)

    @property
    def half(self) -> int:
        """Columns of the output that a consumer has."""
        return self.spec.value_dim // CONSUMERS

    @property
    def rotated(self) -> int:
        """Columns of a row that are rotated."""
        return self.spec.head_dim - self.spec.value_dim

    @property
    def converts(self) -> bool:
        """Whether latents are made wider on their way into shared memory."""
        return self.kv_dtype != self.dtype

    @property
    def packed(self) -> bool:
        """Whether rows are of bytes, with a scale for each tile of a row."""
        return is_packed(self.kv_dtype)

    @property
    def copies(self) -> PageCopies:
        return PageCopies.of(self.spec, BLOCK_KV, self.page_size, BLOCK_KV // tiles.WARPS)


class Operands(NamedTuple):
    """What the kernel reads; None where a call has no use for it. The schedule's tiles are pairs of the kernel's.

    Attributes:
        q_nope, q_pe: Rows token by token, padded to whole blocks.
        pages: With a leading layer axis.
        layer: Which of them.
        work_tiles, workers, places: Of the schedule.
        whole_end: Of each sequence: keys below this number are seen by all of its rows.
        first, end: Bounds of the keys that rows see: `end` of one token is in the schedule.
        logit_factor: Of the products of a sequence, or of all.
        out_factor: Of the output.
        mask: For each key of a sequence a bit for each token that sees it.
        sequence: Whose row of the page table is that of a sequence, where several share one.
    """

    q_nope: Any  # [B, rows, C]
    q_pe: Any  # [B, rows, R]
    pages: Any  # [L, P, page_size, 1, C + R], or bytes
    page_table: Any  # [B, max_pages]
    layer: Any  # [1]
    work_tiles: Any  # [W, 5]
    workers: Any  # [workers, 7]
    whole_end: Any  # [B]
    first: Any = None  # [B, rows]
    end: Any = None  # [B, rows]
    logit_factor: Any = None  # [B or 1, 1]
    out_factor: Any = None  # [1]
    mask: Any = None  # [B, keys]
    sequence: Any = None  # [B]
    places: Any = None  # [W]


class SharedMemory(NamedTuple):
    """Shared memory and barriers of a block. Consumer c has the tiles 2 i + c, and half c of the output's columns.

    Attributes:
        q: A work tile's queries, a half of the columns after the other.
        q_pe: Their rotated columns.
        own: Of each consumer's tile the columns of its own half.
        other: Those of the other half.
        pe: The rotated ones, and in their place, once they are multiplied, the consumer's probabilities.
        of_registers: Each consumer's, in the interpreter only.
        zeros: A zero of each consumer's, which the compiler does not know of.
        maxima: Each consumer's running maximum of every row in base 2.
        sums: Each consumer's sums of exponentials, of this work tile and the last.
        q_full, q_empty: producer -> consumers: a work tile's q has arrived; back: is no longer needed.
        own_full, other_full: producer -> consumers: columns of each consumer's tile have arrived, those of `pe` with
            the other ones.
        own_empty, other_empty: Back, from the one consumer that reads them last: its own; the other one.
        p_full, sum_full: consumer <-> consumer, of probabilities with `maxima`, and of `sums`: one for each of theirs,
            as a consumer may be done with a work tile of no keys before the other one has seen its sums of the last.
    """

    q: Any  # [2, 64, C / 2]
    q_pe: Any  # [64, R]
    own: Any  # [2, 64, C / 2]
    other: Any  # [2, 64, C / 2]
    pe: Any  # [2, 64, R]
    of_registers: Any  # [64, 64] of each, or None
    zeros: Any  # [2]
    maxima: Any  # [2, 64]
    sums: Any  # [2, 2, 64]
    q_full: Any
    q_empty: Any
    own_full: Any  # [2]
    other_full: Any  # [2]
    own_empty: Any  # [2]
    other_empty: Any  # [2]
    p_full: Any  # [2]
    sum_full: Any  # [2 * 2]


def shared_memory(config: LatentConfig) -> SharedMemory:
    """What `pl.run_scoped` allocates."""
    dtype = config.dtype
    copies = config.copies.copies
    own_arrivals, other_arrivals = (1, 1) if config.converts else (copies, 2 * copies)
    half = tiles.tile((CONSUMERS, BLOCK_KV, config.half), dtype)
    each = plgpu.Barrier(num_barriers=CONSUMERS)
    return SharedMemory(
        q=tiles.tile((CONSUMERS, BLOCK_ROWS, config.half), dtype),
        q_pe=tiles.tile((BLOCK_ROWS, config.rotated), dtype),
        own=half,
        other=half,
        pe=tiles.tile((CONSUMERS, BLOCK_KV, config.rotated), dtype),
        zeros=plgpu.SMEM((CONSUMERS,), jnp.int32),
        of_registers=(tiles.probabilities_tile((BLOCK_ROWS, BLOCK_KV), dtype),) * CONSUMERS,
        maxima=plgpu.SMEM((CONSUMERS, BLOCK_ROWS), jnp.float32),
        sums=plgpu.SMEM((2, CONSUMERS, BLOCK_ROWS), jnp.float32),
        q_full=plgpu.Barrier(num_arrivals=CONSUMERS + 1),
        q_empty=plgpu.Barrier(num_arrivals=CONSUMERS),
        own_full=plgpu.Barrier(num_arrivals=own_arrivals, num_barriers=CONSUMERS),
        other_full=plgpu.Barrier(num_arrivals=other_arrivals, num_barriers=CONSUMERS),
        own_empty=each,
        other_empty=each,
        p_full=each,
        sum_full=plgpu.Barrier(num_barriers=2 * CONSUMERS),
    )
