"""What the Hopper kernels share on the device: tiles in shared memory, copies of pages, products, interpret mode."""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jattn_kernels import call
from jattn_kernels.spec import AttentionSpec, CombinedPool, PageLayout

_H200_SMS = 132
SHARED_MEMORY_BYTES = 228 * 1024  # of an SM of Hopper
REDUCTION_BYTES = 2 * 1024  # what Mosaic reserves for reductions across warps
RESERVED_BYTES = 3 * 1024 + 128  # of each block: the driver's own, barriers, alignment
WGMMA_ROWS = 64  # of one warpgroup's product
WARPS = 4  # of a warpgroup
TILED_ROWS = 8  # rows that lie together in tiled shared memory: what starts and ends there is a multiple
COPY_ALIGNMENT = 128  # bytes: TMA writes to multiples of them in shared memory, and faults elsewhere
BEST_COPY_BYTES = 16 * 1024  # a copy twice as large arrives later than two


def aligned_rows(rows: int, row_bytes: int) -> int:
    """The fewest rows, from so many on, behind which a copy into shared memory may begin."""
    together = COPY_ALIGNMENT // math.gcd(COPY_ALIGNMENT, row_bytes)
    return pl.cdiv(rows, together) * together


def num_sms() -> int:
    """Streaming multiprocessors of the GPU that calls are compiled for; an H200's where JAX has none."""
    return call.default_device().num_sms or _H200_SMS


_interpret: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=None)


@contextlib.contextmanager
def interpreted(params: plgpu.InterpretGPUParams) -> Iterator[None]:
    """Kernels traced inside run on the CPU, under Pallas' interpreter for Mosaic GPU."""
    token = _interpret.set(params)
    try:
        yield
    finally:
        _interpret.reset(token)


def interpret_params() -> plgpu.InterpretGPUParams | None:
    """What `interpreted` was given, or None on a GPU."""
    return _interpret.get()


def tile(shape: tuple[int, ...], dtype: Any, copied_columns: int | None = None) -> Any:
    """Shared memory in the form that TMA writes and wgmma reads; the last two axes are the tile.

    Args:
        copied_columns: How many columns a copy brings, if not all; both operands of a product take the same number.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle((copied_columns or shape[-1]) * itemsize * 8)
    tiling: Any = plgpu.TilingTransform  # typed as abstract
    swizzling: Any = plgpu.SwizzleTransform
    transforms = (tiling((TILED_ROWS, swizzle // itemsize)), swizzling(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def probabilities_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Where the interpreter keeps the probabilities; a GPU keeps them in registers."""
    return None if interpret_params() is None else tile(shape, dtype)


def overlaid(*buffers: Any) -> Any:
    """Shared memory that several buffers use in turn, each warpgroup its own part.

    The interpreter keeps them apart: its race detector would take the parts of two warpgroups for the same memory.
    """
    return plgpu.RefUnion(*buffers) if interpret_params() is None else buffers


def by_warps(copies: int, run: Callable[[list[Any], Any], None]) -> None:
    """Calls `run(numbers, is_first)` in each warp of the warpgroup, on its own, with its share of some copies' numbers.

    The interpreter calls it once, with all.

    Args:
        copies: A power of two.
    """
    if interpret_params() is not None:
        run(list(range(copies)), True)
        return

    @plgpu.warp_map
    def share(warp):
        own = [warp + begin for begin in range(0, copies, WARPS)]
        pl.when(warp < copies)(functools.partial(run, own, warp == 0))


def accumulator(rows: int, columns: int) -> Any:
    """Where a product of a warpgroup is summed."""
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def accumulate(acc: jax.Array, a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
    """acc + a @ b, where a GPU starts from the accumulator and the interpreter cannot; calls `meanwhile` as it runs."""
    if interpret_params() is None:

        def product(ref):
            plgpu.wgmma(ref, a, b)
            meanwhile()

        start: Any = plgpu.WGMMAAccumulatorRef.init(acc)
        return pl.run_state(product)(start)

    def product_alone(ref):
        plgpu.wgmma(ref, a, b)
        meanwhile()
        return ref[...]

    return acc + pl.run_scoped(product_alone, accumulator(*acc.shape))


def add_product(
    acc: jax.Array, p: jax.Array, v_smem: Any, p_smem: Any, meanwhile: Callable[[], None] = lambda: None
) -> jax.Array:
    """acc + p @ v; a GPU takes p from registers, the interpreter only from shared memory."""
    if p_smem is None:
        return accumulate(acc, p, v_smem, meanwhile)
    p_smem[...] = p
    return accumulate(acc, p_smem, v_smem, meanwhile)


def zero_rows_from(v_smem: Any, first: jax.Array, before: jax.Array | None = None) -> None:
    """Clears the rows that the request does not own: 0 * NaN is NaN, so masking the probabilities is not enough.

    Args:
        before: Rows before this one are cleared too.
    """
    v = plgpu.load(v_smem, layout=plgpu.Layout.WGMMA, optimized=False)
    rows = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
    owned = rows < first
    if before is not None:
        owned &= rows >= before
    v_smem[...] = jnp.where(owned, v, jnp.zeros_like(v))
    plgpu.commit_smem()


def rows_of_best_copy(width: int, dtype: Any) -> int:
    """Rows of so many columns that one copy had best bring, a power of two."""
    return 1 << (BEST_COPY_BYTES // (width * jnp.dtype(dtype).itemsize)).bit_length() - 1


@dataclasses.dataclass(frozen=True)
class PageCopies:
    """How a tile of keys is put together from pages, or cut out of a larger page.

    Attributes:
        block_kv: Keys a tile.
        page_size: Tokens a page.
        page_layout: Axes of a page.
        combined_pool: Where keys and values are in the pool that they share.
        most_rows: Keys that one copy may bring. Into tiles that are wider than a row no more than lie together.
    """

    block_kv: int
    page_size: int
    page_layout: PageLayout
    combined_pool: CombinedPool | None = None
    most_rows: int | None = None

    def __post_init__(self):
        assert self.block_kv % self.page_size == 0 or self.page_size % self.block_kv == 0

    @classmethod
    def of(cls, spec: AttentionSpec, block_kv: int, page_size: int, most_rows: int | None = None) -> "PageCopies":
        """Those of a layer's pool."""
        return cls(block_kv, page_size, spec.page_layout, spec.combined_pool, most_rows)

    @property
    def rows(self) -> int:
        """Keys that one copy brings."""
        return min(self.block_kv, self.page_size, self.most_rows or self.block_kv)

    @property
    def copies(self) -> int:
        """Copies a tile; each arrives once on the tile's barrier."""
        return self.block_kv // self.rows

    def pages(
        self,
        table_ref: Any,
        sequence: jax.Array,
        tile_index: jax.Array | int,
        last_key: jax.Array,
        copies: Collection[Any] | None = None,
    ) -> list[jax.Array]:
        """The page of each copy, or of some; past the sequence's last page, that page again."""
        copies = range(self.copies) if copies is None else copies
        keys = [jnp.minimum(tile_index * self.block_kv + copy * self.rows, last_key) for copy in copies]
        return [table_ref[sequence, jax.lax.div(key, self.page_size)] for key in keys]

    def start(
        self,
        pages_ref: Any,
        place: "PoolPlace",
        pages: list[Any],
        tile_index: Any,
        smem: Any,
        barrier: Any,
        *,
        copies: Collection[Any] | None = None,
        end_key: Any = None,
        columns: Any = None,
    ) -> None:
        """Starts the copies of one tile of keys or values, or some of them.

        Args:
            pages: Of each copy.
            smem: May be wider than a row: the columns past a row's end stay as they are.
            copies: Their numbers; None is all.
            end_key: Nothing is read from here on: the copies that would bring nothing else only arrive.
            columns: Of a row; None is all.
        """
        row, width = (), pages_ref.shape[-1]
        if columns is not None:
            row, width = (columns,), columns.size
        for copy, page in zip(range(self.copies) if copies is None else copies, pages, strict=True):
            key = tile_index * self.block_kv + copy * self.rows
            rows = pl.ds(0 if self.page_size == self.rows else jax.lax.rem(key, self.page_size), self.rows)
            match self.combined_pool:
                case None:
                    where = (place.layer, page)
                case "pages_first":
                    where = (place.layer, page, place.of_values)
                case "kv_first":
                    where = (place.layer, place.of_values, page)
            where += (rows, place.head, *row) if self.page_layout == "NHD" else (place.head, rows, *row)

            def bring(where=where, copy=copy):
                target = smem.at[pl.ds(copy * self.rows, self.rows), pl.ds(0, width)]
                plgpu.copy_gmem_to_smem(pages_ref.at[where], target, barrier)

            if end_key is None:
                bring()
                continue
            pl.when(key < end_key)(bring)
            pl.when(key >= end_key)(lambda: plgpu.barrier_arrive(barrier))


class PoolPlace(NamedTuple):
    """Where in a pool a tile comes from.

    Attributes:
        of_values: 0 for keys and 1 for values, where they share a pool.
    """

    layer: Any
    head: Any
    of_values: int
