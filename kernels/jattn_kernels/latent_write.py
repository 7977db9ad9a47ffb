"""The faces of what ends a latent row: norm of its compressed part, turn of the rest, write into its page."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jattn_kernels.call import AttentionCall, modes_of
from jattn_kernels.dispatch import choose
from jattn_kernels.operands import LatentRowOperands
from jattn_kernels.raw_latents import RawLatents, check_raw_latents
from jattn_kernels.raw_queries import RawQueries, check_raw_queries
from jattn_kernels.shapes.arrays import check_int32
from jattn_kernels.shapes.latent import latent_geometry, row_width
from jattn_kernels.spec import AttentionSpec


def mla_write(
    latents: RawLatents,
    latent_pages: Shaped[Array, "*L P page_size bytes"],
    slots: Int[Array, " T"],
    *,
    layer_index: Int[Array, ""] | int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T W"], Shaped[Array, "*L P page_size bytes"]]:
    """The rows that are made, and latent pages with them at their slots; in place where the pages are donated.

    Args:
        latent_pages: As `write_latent_pages` takes them; of packed rows what is returned beside is not rounded.
        slots, layer_index: As `write_latent_pages` takes them.
        implementation: Which one to use; None lets dispatch choose.

    Raises:
        ValueError: A shape or dtype is wrong, or `implementation` is unknown.
        NotImplementedError: The implementation that was asked for refuses.
    """
    call, operands = _packed(latents, latent_pages, slots, layer_index)
    return choose(call, implementation).implementation.run(call, operands)


def absorb_and_write(
    queries: RawQueries,
    latents: RawLatents,
    latent_pages: Shaped[Array, "*L P page_size bytes"],
    slots: Int[Array, " T"],
    *,
    layer_index: Int[Array, ""] | int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N C"], Float[Array, "T N R"], Float[Array, "T W"], Shaped[Array, "*L P page_size bytes"]]:
    """Queries that have taken up the keys' projection, what turns of them, turned, and what `mla_write` gives.

    One kernel on Hopper, of up to 64 tokens; nothing else does all of it at once.

    Args:
        latents: Also has the angles that queries turn by.

    Raises:
        ValueError: A shape or dtype is wrong, or `implementation` is unknown.
        NotImplementedError: No implementation serves it, or the one that was asked for refuses.
    """
    call, operands = _packed(latents, latent_pages, slots, layer_index)
    check_raw_queries(queries, call.num_tokens or 0, latents.compressed)
    turned = latents.width - latents.compressed
    if queries.rope_dim != turned or queries.dtype != latents.dtype:
        raise ValueError(
            f"`queries` must turn in {turned} numbers, as `latents` do, and be of their dtype, {latents.dtype}. "
            f"Got rope_dim={queries.rope_dim} of {queries.dtype}."
        )
    spec = dataclasses.replace(call.spec, num_q_heads=queries.num_heads)
    call = dataclasses.replace(call, spec=spec, absorbed=queries.nope_dim)
    operands = dataclasses.replace(operands, queries=queries)
    return choose(call, implementation).implementation.run(call, operands)


def _packed(
    latents: RawLatents, latent_pages: Any, slots: Any, layer_index: Any
) -> tuple[AttentionCall, LatentRowOperands]:
    """The call of a write and its operands, once they are checked."""
    check_raw_latents(latents)
    facts = latent_geometry(latent_pages, layer_index=layer_index)
    num_tokens, width = latents.rows.shape[0], latents.width
    wanted = row_width(latent_pages, latents.compressed, width - latents.compressed)
    if facts.head_dim != wanted:
        raise ValueError(
            f"`latent_pages` must be as wide as the rows, {wanted}. Got latent_pages.shape={latent_pages.shape}."
        )
    check_int32("slots", slots, (num_tokens,))
    operands = LatentRowOperands(
        latents=latents, pages=jnp.asarray(latent_pages), slots=jnp.asarray(slots), layer_index=layer_index
    )
    call = AttentionCall(
        operation="mla_write",
        spec=AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=width, v_head_dim=latents.compressed, sm_scale=1.0),
        q_dtype=latents.dtype.name,
        kv_dtype=latent_pages.dtype.name,
        page_size=facts.page_size,
        num_tokens=num_tokens,
        modes=modes_of(operands),
    )
    return call, operands
