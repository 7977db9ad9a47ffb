"""Attention that is meant, and not computed yet: for a kernel that computes it itself, before what it does with it."""

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jattn_kernels.attention import paged_decode
from jattn_kernels.call import AttentionCall, Schedule, modes_of
from jattn_kernels.dispatch import choose, serves
from jattn_kernels.head_norms import HeadNorms
from jattn_kernels.operands import AttentionOptions, RotaryOperands, TokenOperands
from jattn_kernels.rotary import rotate_and_write
from jattn_kernels.serve import work_of
from jattn_kernels.shapes.attention import check_paged_decode
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.splits import Splits


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unattended:
    """What is read as the rows of `paged_decode` of one token a sequence, after `rotate_and_write`.

    The pages have not got the tokens' keys and values; who computes it returns those that have.

    Attributes:
        qkv, cos, sin, slots, norms: As of `rotate_and_write`.
        Others: As of `paged_decode`; the last two are static.
    """

    qkv: Float[Array, "T heads H"] | Splits
    cos: Float32[Array, "T half"]
    sin: Float32[Array, "T half"]
    slots: Int[Array, " T"]
    norms: HeadNorms | None = None
    k_pages: Float[Array, "L ..."]
    v_pages: Float[Array, "L ..."]
    page_table: Int[Array, "T max_pages"]
    seq_lens: Int[Array, " T"]
    layer_index: Int[Array, ""] | int
    schedule: Schedule | None = None
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})
    implementation: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return (self.qkv.shape[0], self.spec.num_q_heads * self.spec.value_dim)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.qkv.dtype


Pages = tuple[Float[Array, "L ..."], Float[Array, "L ..."]]


def attended(rows: Unattended) -> tuple[Float[Array, "T D"], Pages]:
    """The rows that are meant, and the pages with the tokens' keys and values, by one kernel or two."""
    if (result := attended_at_once(rows)) is not None:
        return result
    q, k_pages, v_pages = rotate_and_write(
        rows.qkv,
        rows.cos,
        rows.sin,
        rows.k_pages,
        rows.v_pages,
        rows.slots,
        num_kv_heads=rows.spec.num_kv_heads,
        layout=rows.spec.page_layout,
        layer_index=rows.layer_index,
        norms=rows.norms,
        implementation=rows.implementation,
    )
    out = paged_decode(
        q[:, None],
        k_pages,
        v_pages,
        rows.page_table,
        rows.seq_lens,
        spec=rows.spec,
        schedule=rows.schedule,
        implementation=rows.implementation,
        layer_index=rows.layer_index,
    )
    assert not isinstance(out, tuple)
    return out.reshape(rows.shape), (k_pages, v_pages)


def attended_at_once(rows: Unattended) -> tuple[Float[Array, "T D"], Pages] | None:
    """The same by one kernel, but for the merge of splits; None if there is none."""
    if not isinstance(rows.qkv, Splits):
        return None
    call, operands = unattended_call(rows)
    call = dataclasses.replace(call, operation="projected_decode")
    if not serves(call, rows.implementation):
        return None
    chosen = choose(call, rows.implementation).implementation
    if rows.schedule is not None:
        work = work_of(rows.schedule, dataclasses.replace(call, operation="paged_decode"), chosen.name)
        operands = dataclasses.replace(operands, schedule=work)
    out, *pages = chosen.run(call, operands)
    return out.reshape(rows.shape), tuple(pages)


def unattended_call(rows: Unattended) -> tuple[AttentionCall, TokenOperands]:
    """The call that is meant, and its operands.

    Raises:
        ValueError: As `paged_decode`.
    """
    qkv, spec = rows.qkv, rows.spec
    if not isinstance(qkv, Splits):
        qkv = Splits(parts=qkv[None].astype(jnp.float32), num_rows=qkv.shape[0], dtype=qkv.dtype)
    layer, q = jnp.asarray(rows.layer_index, jnp.int32), jnp.zeros((qkv.shape[0], 1, spec.num_q_heads, spec.head_dim))
    given = AttentionOptions(layer_index=layer)
    places = rows.k_pages, rows.v_pages, rows.page_table, rows.seq_lens
    page_size = check_paged_decode(q.astype(qkv.dtype), *places, given, spec)
    rotary = RotaryOperands(
        qkv=qkv,
        cos=rows.cos,
        sin=rows.sin,
        k_pages=rows.k_pages,
        v_pages=rows.v_pages,
        slots=rows.slots,
        layer_index=layer,
        norms=rows.norms,
    )
    operands = TokenOperands(rotary=rotary, page_table=rows.page_table, seq_lens=rows.seq_lens)
    features = {"partial_rotary": 2 * rows.cos.shape[-1] < spec.head_dim, "head_norms": rows.norms is not None}
    call = AttentionCall(
        operation="paged_decode",
        spec=spec,
        q_dtype=qkv.dtype.name,
        kv_dtype=rows.k_pages.dtype.name,
        page_size=page_size,
        num_tokens=1,
        num_seqs=rows.seq_lens.shape[0],
        features=given.given() | {name for name, is_given in features.items() if is_given},
        modes=modes_of(operands),
    )
    return call, operands
