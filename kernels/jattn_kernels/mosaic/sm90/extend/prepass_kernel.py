"""The prepass kernel: keys and values of pages as extend multiplies them, tile after tile, keys rotated if need be.

grid (sequences, tiles, kv heads)    one warpgroup: TMA brings a tile of keys and one of values, page by page; fp8 is
                                     dequantised into tiles of its own; keys are rotated; TMA takes both out
shared memory: the two tiles, 64 KiB at head_dim 128 and 16 bits. Several blocks share an SM: while one rotates, others
copy. A block whose tile lies past its sequence's end does nothing.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jaxtyping import Array, Float, Int

from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.convert import dequantise_tile
from jattn_kernels.mosaic.sm90.common.key_rotation import KeyRotation, RotationTables
from jattn_kernels.mosaic.sm90.common.tiles import PageCopies, PoolPlace
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.spec import AttentionSpec


class _Operands(NamedTuple):
    """What the kernel reads; `rotations` is None where keys stay as they are."""

    k: Any
    v: Any
    page_table: Any
    seq_lens: Any
    layer: Any
    rotations: RotationTables | None


class _Scratch(NamedTuple):
    """What a block has of keys and of values: tiles as they were copied, and those that are dequantised, else None."""

    copied: tuple[Any, Any]
    dequantised: tuple[Any, Any]
    full: Any


def convert_pages(
    keys_and_values: tuple[Int[Array, "1"], Float[Array, "..."], Float[Array, "..."]],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    *,
    num_tiles: int,
    spec: AttentionSpec,
    dtypes: ExtendDtypes,
    copies: PageCopies,
) -> tuple[Float[Array, "tiles K keys H"], Float[Array, "tiles K keys Hv"]]:
    """Tiles of keys and values in the order of the page table, `num_tiles` a sequence.

    Tiles past a sequence's end, and rows past it in its last tile, hold anything.

    Args:
        keys_and_values: As `stacked` gives them.
        dtypes: Of a kernel that would convert them itself.
    """
    layer, k, v = keys_and_values
    rotations = RotationTables.of(num_tiles * copies.block_kv, spec, dtypes.kv) if dtypes.rotates else None
    leaves, tree = jax.tree.flatten(_Operands(k, v, page_table, seq_lens, layer, rotations))
    num_seqs = seq_lens.shape[0]
    shape = (num_seqs * num_tiles, spec.num_kv_heads, copies.block_kv)
    run = launch.kernel(
        functools.partial(_entry, spec, dtypes, copies, tree),
        out_type=[jax.ShapeDtypeStruct((*shape, width), dtypes.product) for width in (spec.head_dim, spec.value_dim)],
        grid=(num_seqs, num_tiles, spec.num_kv_heads),
        grid_names=("sequence", "tile", "head"),
        kernel_name="convert_pages",
    )
    k_tiles, v_tiles = run(*leaves)
    return k_tiles, v_tiles


def _entry(spec: AttentionSpec, dtypes: ExtendDtypes, copies: PageCopies, tree: Any, *refs: Any) -> None:
    operands, out_refs = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
    # Keys that are rotated are read by halves.
    widths = ((spec.head_dim, spec.head_dim // 2 if dtypes.rotates else None), (spec.value_dim, None))
    copied, dequantised = (
        tuple(tiles.tile((copies.block_kv, width), dtype, columns) for width, columns in widths)
        for dtype in (dtypes.kv, dtypes.product)
    )
    full = plgpu.Barrier(num_arrivals=copies.copies, num_barriers=len(widths))
    pl.run_scoped(
        functools.partial(_block, copies, operands, out_refs),
        _Scratch(copied, dequantised if dtypes.dequantises else (None, None), full),
        collective_axes="warpgroup",
    )


def _block(copies: PageCopies, operands: _Operands, out_refs: Any, scratch: _Scratch) -> None:
    sequence, tile, head = (lax.axis_index(name) for name in ("sequence", "tile", "head"))
    kv_len = operands.seq_lens[sequence]
    place = sequence * lax.axis_size("tile") + tile

    @pl.when(tile * copies.block_kv < kv_len)
    def take_tile():
        pages = copies.pages(operands.page_table, sequence, tile, kv_len - 1)
        for of_values, pool in enumerate((operands.k, operands.v)):
            source = PoolPlace(operands.layer[0], head, of_values)
            copies.start(pool, source, pages, tile, scratch.copied[of_values], scratch.full.at[of_values])
        rotate = None
        if operands.rotations is not None:
            rotations = KeyRotation.load(operands.rotations, copies.block_kv)
            rotate = functools.partial(rotations.rotate, tile=tile, first=rotations.first(tile))
        for of_values, (smem, dequantised, out) in enumerate(zip(*scratch[:2], out_refs, strict=True)):
            plgpu.barrier_wait(scratch.full.at[of_values])
            if dequantised is not None:
                dequantise_tile(smem, dequantised)
                smem = dequantised
            if rotate is not None and not of_values:
                rotate(smem)
            plgpu.copy_smem_to_gmem(smem, out.at[place, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
