"""What stands between the projections of latent attention and decode, in one kernel on Hopper, of few tokens.

grid (blocks)    one warpgroup
  products       64 numbers of a head's absorbed queries, of 8 tokens: acc^T = k_up^T q^T, its weights a copy of 16 KB
  turns          what turns of a head's queries, of 8 tokens
  rows           a token's latent row: as `mla_write` makes and writes it

Each block waits for one round trip to memory, in which queries are added up while the weights come.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float

from jattn_kernels.call import AttentionCall
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.indexed import store_at
from jattn_kernels.mosaic.sm90.common.tile_stores import COLUMNS, constant, divided, store_registers
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.mla_write import HALF, LatentRows, RowRefs
from jattn_kernels.mosaic.sm90.rotate_and_write import halves_layout
from jattn_kernels.operands import LatentRowOperands
from jattn_kernels.splits import Splits, added

_LANES = 32
_CHUNK = 8  # numbers that swizzling moves together


class _Scratch(NamedTuple):
    kernel: Any  # (D, 64)
    x: Any  # (8, D): of tokens
    full: Any


class _Refs(NamedTuple):
    queries: (
        Any  # (T, heads of D + R and others), or of splits (S, T, ...); T in whole fours, or tiles if there are more
    )
    k_up: Any  # (L, N, D, C)
    k_layer: Any
    cos: Any  # (T, 32)
    sin: Any
    rows: RowRefs


def absorb_and_write(
    call: AttentionCall, operands: LatentRowOperands
) -> tuple[Float[Array, "T N C"], Float[Array, "T N R"], Float[Array, "T W"], Float[Array, "*L P page_size W"]]:
    """Absorbed queries, turned ones, the rows, and the pages that have them at their slots."""
    queries, latents, spec = operands.queries, operands.latents, call.spec
    assert queries is not None
    assert call.absorbed is not None
    num_tokens, dtype = latents.rows.shape[0], latents.dtype
    made, rows = LatentRows.of(operands)
    splits = queries.rows if isinstance(queries.rows, Splits) and num_tokens <= TILED_ROWS else None
    body = _Body(made, num_tokens, spec.num_q_heads, call.absorbed, spec.value_dim, splits is not None)
    whole = ((0, -num_tokens % (WARPS if num_tokens <= TILED_ROWS else TILED_ROWS)), (0, 0))
    has_layers = queries.layer_index is not None
    given = _Refs(
        queries=jnp.pad(added(queries.rows), whole) if splits is None else splits.parts,
        k_up=queries.k_up if has_layers else queries.k_up[None],
        k_layer=jnp.asarray(queries.layer_index if has_layers else 0, jnp.int32).reshape(1),
        cos=jnp.pad(latents.cos, whole),
        sin=jnp.pad(latents.sin, whole),
        rows=rows,
    )
    leaves, tree = jax.tree.flatten(given)
    shapes = (
        (num_tokens, spec.num_q_heads, spec.value_dim),
        (num_tokens, spec.num_q_heads, 2 * HALF),
        (num_tokens, spec.head_dim),
    )
    run = launch.kernel(
        functools.partial(body.run, tree),
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
        grid=(body.products + body.turns + num_tokens,),
        grid_names=("block",),
        kernel_name="mla_queries",
    )
    q_nope, q_pe, new = run(*leaves)
    (written,) = launch.frozen(rows.pages)
    return q_nope, q_pe, new, written.reshape(operands.pages.shape)


@dataclasses.dataclass(frozen=True)
class _Body:
    latents: LatentRows
    num_tokens: int
    num_heads: int
    nope_dim: int
    compressed: int
    in_splits: bool

    @property
    def dtype(self) -> Any:
        return self.latents.dtype

    @property
    def column_blocks(self) -> int:
        """Of a head's absorbed queries."""
        return self.compressed // WGMMA_ROWS

    @property
    def products(self) -> int:
        """Blocks of all heads."""
        return self.turns * self.column_blocks

    @property
    def turns(self) -> int:
        """Likewise."""
        return self.num_heads * pl.cdiv(self.num_tokens, TILED_ROWS)

    def run(self, tree: Any, *refs: Any) -> None:
        given: _Refs = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        absorbed, turned, rows = refs[tree.num_leaves :]
        block = lax.axis_index("block")
        scratch = _Scratch(
            kernel=tiles.tile((self.nope_dim, WGMMA_ROWS), self.dtype),
            x=tiles.tile((TILED_ROWS, self.nope_dim), self.dtype),
            full=plgpu.Barrier(),
        )

        def warpgroup(scratch: _Scratch) -> None:
            turns, writes = block - self.products, block - self.products - self.turns
            pl.when(turns < 0)(functools.partial(self._absorb, given, absorbed, scratch, block))
            pl.when((turns >= 0) & (writes < 0))(functools.partial(self._turn, given, turned, turns))
            pl.when(writes >= 0)(functools.partial(self.latents.write, writes, given.rows, rows))

        pl.run_scoped(warpgroup, scratch, collective_axes="warpgroup")

    def _absorb(self, given: _Refs, out: Any, scratch: _Scratch, block: Any) -> None:
        """64 numbers of a head's queries."""
        turn, own = lax.div(block, self.column_blocks), lax.rem(block, self.column_blocks)
        tile, head = lax.div(turn, self.num_heads), lax.rem(turn, self.num_heads)
        weights = given.k_up.at[given.k_layer[0], head, :, pl.ds(own * WGMMA_ROWS, WGMMA_ROWS)]
        plgpu.copy_gmem_to_smem(weights, scratch.kernel, scratch.full)
        for first in self._fours:
            numbers = self._queries(given, tile, first, head, 0, self.nope_dim).astype(self.dtype)
            _store_rows(scratch.x, first, numbers, halves_layout(WARPS, self.nope_dim))
        plgpu.commit_smem()
        plgpu.barrier_wait(scratch.full)

        def product(acc):
            plgpu.wgmma(acc, scratch.kernel.transpose((1, 0)), scratch.x.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return acc[...]

        result = pl.run_scoped(product, tiles.accumulator(WGMMA_ROWS, TILED_ROWS))
        layout = plgpu.Layout.WGMMA
        column, token = (plgpu.broadcasted_iota(jnp.int32, result.shape, axis, layout=layout) for axis in range(2))
        token += tile * TILED_ROWS
        place = (token * self.num_heads + head) * self.compressed + own * WGMMA_ROWS + column
        store_at(out, jnp.where(token < self.num_tokens, place, -1), result.astype(self.dtype), layout)

    def _turn(self, given: _Refs, out: Any, turn: Any) -> None:
        """What turns of a head."""
        tile, head = lax.div(turn, self.num_heads), lax.rem(turn, self.num_heads)
        layout = halves_layout(WARPS, HALF)
        for first in self._fours:
            one, other = (
                self._queries(given, tile, first, head, self.nope_dim + half * HALF, HALF)
                .astype(self.dtype)
                .astype(jnp.float32)
                for half in range(2)
            )
            cos, sin = (
                plgpu.load(ref.at[pl.ds(tile * TILED_ROWS + first, WARPS)], layout=layout, optimized=False)
                for ref in (given.cos, given.sin)
            )
            token, column = (plgpu.broadcasted_iota(jnp.int32, (WARPS, HALF), axis, layout=layout) for axis in range(2))
            token += tile * TILED_ROWS + first
            for half, numbers in enumerate((one * cos - other * sin, other * cos + one * sin)):
                place = (token * self.num_heads + head) * 2 * HALF + half * HALF + column
                place = jnp.where(token < self.num_tokens, place, -1)
                store_at(out, place, numbers.astype(self.dtype), layout, along=1)

    @property
    def _fours(self) -> range:
        """The first of each four tokens of a tile."""
        return range(0, min(self.num_tokens, TILED_ROWS), WARPS)

    def _queries(self, given: _Refs, tile: Any, first: int, head: Any, begin: int, size: int) -> jax.Array:
        """Some numbers of a head of four tokens of a tile, in float32."""
        layout, rows = halves_layout(WARPS, size), pl.ds(tile * TILED_ROWS + first, WARPS)
        columns = pl.ds(pl.multiple_of(head * (self.nope_dim + 2 * HALF) + begin, HALF), size)

        def load(ref: Any) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        if not self.in_splits:
            return load(given.queries.at[rows, columns])
        count = given.queries.shape[0]
        return functools.reduce(operator.add, [load(given.queries.at[i, rows, columns]) for i in range(count)])


def _store_rows(target: Any, first: int, values: jax.Array, layout: Any) -> None:
    """target[first : first + 4] = values, a row a warp; the target is of eight rows."""
    rows, columns = values.shape
    if tiles.interpret_params() is not None:
        target[pl.ds(first, rows)] = values
        return
    at_once = columns // _LANES

    def places(thread: Any) -> Any:
        warp, lane = divided(thread, _LANES)
        row = arith.addi(warp, constant(first))
        tile, in_tile = divided(arith.muli(lane, constant(at_once)), COLUMNS)
        chunk, in_chunk = divided(in_tile, _CHUNK)
        chunk = arith.xori(chunk, row)
        place = arith.addi(arith.muli(tile, constant(TILED_ROWS)), row)
        place = arith.addi(arith.muli(place, constant(COLUMNS)), arith.muli(chunk, constant(_CHUNK)))
        return lambda i: arith.addi(place, in_chunk)

    store_registers(target, values, layout, places)
