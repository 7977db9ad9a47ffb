"""Attention over latent rows that is meant, and not computed yet: for a kernel that computes it before what follows."""

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall, Schedule, modes_of
from jattn_kernels.mla import mla_decode
from jattn_kernels.operands import AttentionOptions, LatentTokenOperands
from jattn_kernels.shapes.latent import check_mla_decode
from jattn_kernels.spec import AttentionSpec


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class UnattendedLatents:
    """What is read as the values of heads from `mla_decode` of one token a sequence, whose rows are in their pages.

    Attributes:
        v_up: Each head's projection of values, of all layers.
        v_up_layer: Which of them.
        Others: As of `mla_decode`; the last two are static.
    """

    q_nope: Float[Array, "T N C"]
    q_pe: Float[Array, "T N R"]
    latent_pages: Float[Array, "L P page_size W"]
    page_table: Int[Array, "T max_pages"]
    seq_lens: Int[Array, " T"]
    layer_index: Int[Array, ""] | int
    v_up: Float[Array, "L N V C"]
    v_up_layer: Int[Array, ""] | int
    schedule: Schedule | None = None
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})
    implementation: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return (self.q_nope.shape[0], self.v_up.shape[1] * self.v_up.shape[2])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.q_nope.dtype


def attended_latents(rows: UnattendedLatents) -> Float[Array, "T D"]:
    """The rows that are meant."""
    out = mla_decode(
        rows.q_nope[:, None],
        rows.q_pe[:, None],
        rows.latent_pages,
        rows.page_table,
        rows.seq_lens,
        spec=rows.spec,
        schedule=rows.schedule,
        implementation=rows.implementation,
        layer_index=rows.layer_index,
    )
    assert not isinstance(out, tuple)
    precision = "highest" if out.dtype == jnp.float32 else None
    return jnp.einsum("tnc,nvc->tnv", out[:, 0], rows.v_up[rows.v_up_layer], precision=precision).reshape(rows.shape)


def unattended_latents_call(rows: UnattendedLatents) -> tuple[AttentionCall, LatentTokenOperands]:
    """The call that is meant, and its operands.

    Raises:
        ValueError: As `mla_decode`; or `v_up` is not of the queries' heads.
    """
    layer = jnp.asarray(rows.layer_index, jnp.int32)
    given, places = AttentionOptions(layer_index=layer), (rows.latent_pages, rows.page_table, rows.seq_lens)
    page_size = check_mla_decode(rows.q_nope[:, None], rows.q_pe[:, None], *places, given, rows.spec)
    heads, compressed = rows.q_nope.shape[1:]
    if rows.v_up.ndim != 4 or rows.v_up.shape[1] != heads or rows.v_up.shape[3] != compressed:
        raise ValueError(
            f"`v_up` must have a projection [values, {compressed}] for each layer and each of {heads} heads. Got "
            f"v_up.shape={rows.v_up.shape}."
        )
    operands = LatentTokenOperands(
        q=rows.q_nope[0],
        q_pe=rows.q_pe[0],
        pages=jnp.expand_dims(rows.latent_pages, -2),
        page_table=rows.page_table,
        seq_lens=rows.seq_lens,
        layer_index=layer,
        values=rows.v_up,
        values_layer=jnp.asarray(rows.v_up_layer, jnp.int32),
    )
    call = AttentionCall(
        operation="mla_decode",
        spec=rows.spec,
        q_dtype=rows.dtype.name,
        kv_dtype=rows.latent_pages.dtype.name,
        page_size=page_size,
        num_tokens=1,
        num_seqs=rows.seq_lens.shape[0],
        features=given.given(),
        modes=modes_of(operands),
    )
    return call, operands
