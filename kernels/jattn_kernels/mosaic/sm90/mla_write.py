"""What ends a latent row on Hopper, in one kernel: the norm of its compressed part, the turn of the rest, the write.

grid (tokens)    one warpgroup: a row in registers, the compressed part over all threads, the rest by each warp

As a step of few tokens waits for one round trip to memory here, all is asked for at once.
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
from jaxtyping import Array, Float

from jattn_kernels.call import AttentionCall
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.mosaic.sm90.common.operands import stacked
from jattn_kernels.mosaic.sm90.rotate_and_write import halves_layout
from jattn_kernels.operands import LatentRowOperands
from jattn_kernels.raw_latents import RawLatents
from jattn_kernels.splits import Splits

_THREADS, _MOST_AT_ONCE = 128, 8  # numbers that a thread loads at once
HALF = 32  # of the part that turns


class RowRefs(NamedTuple):
    """What the kernel reads of all rows, and the pages of all layers, which it writes into."""

    rows: Any  # (T, W), or of splits (S, R, W)
    cos: Any  # (T, 32)
    sin: Any
    scale: Any  # (L, C)
    scale_layer: Any
    slots: Any  # (T,)
    layer: Any
    pages: Any  # (tokens of all layers, W)


@dataclasses.dataclass(frozen=True)
class LatentRows:
    """How rows are made.

    Attributes:
        begin, compressed, eps, dtype: As of RawLatents.
        in_splits: Whether several add up to one.
        tokens_of_layer: That the pages of a layer hold.
    """

    begin: int
    compressed: int
    eps: float
    dtype: Any
    in_splits: bool
    tokens_of_layer: int

    @classmethod
    def of(cls, operands: LatentRowOperands) -> tuple["LatentRows", RowRefs]:
        """The rows, and the arrays, and a Ref of the pages, in the places of the kernel's Refs."""
        latents = _aligned(operands.latents)
        layer, pages, _ = stacked(operands.pages, None, operands.layer_index)
        scale, scale_layer = latents.scales()
        rows = latents.rows.parts if isinstance(latents.rows, Splits) else latents.rows
        pages_ref = jax.new_ref(pages.reshape(-1, latents.width))
        given = RowRefs(rows, latents.cos, latents.sin, scale, scale_layer.reshape(1), operands.slots, layer, pages_ref)
        facts = cls(
            begin=latents.begin,
            compressed=latents.compressed,
            eps=latents.eps,
            dtype=latents.dtype,
            in_splits=isinstance(latents.rows, Splits),
            tokens_of_layer=pages.shape[1] * pages.shape[2],
        )
        return facts, given

    def write(self, token: Any, refs: RowRefs, out: Any) -> None:
        """Makes a token's row, and stores it in `out` and in its place."""
        compressed, dtype = self.compressed, self.dtype
        whole, turned = _layouts(compressed)
        slot = refs.slots[token]

        def load(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)

        def columns(begin, size, layout):
            place = pl.ds(begin, size)
            if not self.in_splits:
                return load(refs.rows.at[token, place], layout)
            count = refs.rows.shape[0]
            parts = [load(refs.rows.at[i, token, place], layout).astype(jnp.float32) for i in range(count)]
            return functools.reduce(operator.add, parts).astype(dtype)

        c_kv = columns(self.begin, compressed, whole).astype(jnp.float32)
        behind = self.begin + compressed
        first, second = (columns(begin, HALF, turned).astype(jnp.float32) for begin in (behind, behind + HALF))
        cos, sin = (load(ref.at[token], turned) for ref in (refs.cos, refs.sin))
        factor = load(refs.scale.at[refs.scale_layer[0]], whole).astype(jnp.float32)

        inverse = lax.rsqrt((c_kv * c_kv).sum() / compressed + self.eps)
        made = (
            (0, (c_kv * inverse * factor).astype(dtype)),
            (compressed, (first * cos - second * sin).astype(dtype)),
            (compressed + HALF, (second * cos + first * sin).astype(dtype)),
        )
        for begin, numbers in made:
            out[token, pl.ds(begin, numbers.shape[0])] = numbers

        @pl.when((slot >= 0) & (slot < self.tokens_of_layer))
        def write():
            row = refs.layer[0] * self.tokens_of_layer + slot
            for begin, numbers in made:
                refs.pages[row, pl.ds(begin, numbers.shape[0])] = numbers


def _layouts(compressed: int) -> tuple[Any, Any]:
    """Of the compressed part; of a half of the rest, which every warp has."""
    of_thread = compressed // _THREADS
    vector = next(size for size in (_MOST_AT_ONCE, 4, 2, 1) if of_thread % size == 0)
    return plgpu.Layout.WG_STRIDED((compressed,), vec_size=vector), halves_layout(4, HALF).reduce(0)


def _aligned(latents: RawLatents) -> RawLatents:
    """The same rows, behind no other numbers where that would part what a thread loads at once."""
    if latents.begin % _MOST_AT_ONCE == 0:
        return latents
    rows, own = latents.rows, slice(latents.begin, None)
    rows = dataclasses.replace(rows, parts=rows.parts[..., own]) if isinstance(rows, Splits) else rows[:, own]
    return dataclasses.replace(latents, rows=rows, begin=0)


def mla_write(
    call: AttentionCall, operands: LatentRowOperands
) -> tuple[Float[Array, "T W"], Float[Array, "*L P page_size W"]]:
    """The rows, and the pages that have them at their slots."""
    made, given = LatentRows.of(operands)
    num_tokens = operands.latents.rows.shape[0]

    def kernel(*refs):
        made.write(lax.axis_index("token"), RowRefs(*refs[:-1]), refs[-1])

    run = launch.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens, call.spec.head_dim), operands.latents.dtype),
        grid=(num_tokens,),
        grid_names=("token",),
        kernel_name="mla_write",
    )
    out = run(*given)
    (written,) = launch.frozen(given.pages)
    return out, written.reshape(operands.pages.shape)
