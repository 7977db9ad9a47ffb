"""Attention of prompts over latent rows, expanded: keys and values are made of the rows, and then attended to.

own tokens of all sequences                      causal
prefixes of those with many new tokens           part by part, as long as there are any, merged by lse
the rest: decodes, short extends                 absorbed, over their pages, in place of what they got above
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jattn.attention.latent_heads import LatentHeads
from jattn.attention.latent_plan import AbsorbedPart, LatentPlan, owners
from jattn.attention.paged_call import attend_pages
from jattn_kernels import merge_state, ragged_extend, read_latent_pages
from jattn_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentPages:
    """One layer's rows in a pool.

    Attributes:
        pages: Of all layers.
        value_dim: How many numbers of a row are compressed.
        scale: Factor of rows in fp8.
    """

    pages: Shaped[Array, "L P page W"]
    page_table: Int[Array, "B max_pages"]
    layer_index: Int[Array, ""] | int
    value_dim: int
    scale: Float[Array, "..."] | None

    def rows(self, slots: Int[Array, " S"], dtype: Any) -> Float[Array, "S W"]:
        """Those at some slots; 0 where a slot is out of range."""
        facts: dict[str, Any] = {"layer_index": self.layer_index, "value_dim": self.value_dim}
        rows = read_latent_pages(self.pages, slots, kv_scale=self.scale, **facts)
        return rows.astype(dtype)

    def slots(self, sequence: Int[Array, " S"], position: Int[Array, " S"]) -> Int[Array, " S"]:
        """Of tokens by their sequence and position."""
        page, offset = jnp.divmod(position, self.pages.shape[2])
        return self.page_table[sequence, page] * self.pages.shape[2] + offset


def extend_expanded(
    q_nope: Float[Array, "T N D"],
    q_pe: Float[Array, "T N R"],
    rows: Float[Array, "T W"],
    heads: LatentHeads,
    latents: LatentPages,
    plan: LatentPlan,
    *,
    spec: AttentionSpec,
    absorbed_spec: AttentionSpec,
    implementation: str | None = None,
) -> Float[Array, "T N V"]:
    """Output of heads.

    Args:
        rows: Of the launch's own tokens, as the pool stores them.
        spec, absorbed_spec: Of both forms.
    """
    q = jnp.concatenate([q_nope, q_pe], axis=-1)
    has_positions = spec.window_left is not None or spec.chunk_size is not None
    expansion = heads.expansion(rows.shape[1])
    first = {"q_start": plan.prefix_lens} if has_positions else {}

    def attend(rows, starts, spec, kv_start):
        options: dict[str, Any] = {**first, "kv_start": kv_start} if has_positions else {}
        k, v = expansion.keys_and_values(rows)
        facts = {"spec": spec, "implementation": implementation, "return_lse": True}
        return ragged_extend(q, k, v, plan.cu_q_lens, starts, **facts, **options)

    size, before = plan.part_tokens, dataclasses.replace(spec, causal=False)

    def with_part(number, so_far):
        begin = number * size
        place = begin + jnp.arange(size, dtype=jnp.int32)
        owner = owners(plan.prefix_starts, place)
        slots = latents.slots(owner, place - plan.prefix_starts[owner])
        there = latents.rows(jnp.where(place < plan.prefix_starts[-1], slots, -1), rows.dtype)
        starts = jnp.clip(plan.prefix_starts - begin, 0, size)
        part = attend(there, starts, before, jnp.maximum(begin - plan.prefix_starts[:-1], 0))
        return merge_state(*so_far, *part)

    own = attend(rows, plan.cu_q_lens, spec, plan.prefix_lens)
    out, _ = jax.lax.fori_loop(0, -(-plan.prefix_starts[-1] // size), with_part, own)
    for part in plan.absorbed:
        absorbed = _absorbed(part, q_nope, q_pe, heads, latents, spec=absorbed_spec, implementation=implementation)
        out = out.at[part.tokens].set(absorbed, mode="drop")
    return out


def _absorbed(
    part: AbsorbedPart,
    q_nope: Float[Array, "T N D"],
    q_pe: Float[Array, "T N R"],
    heads: LatentHeads,
    latents: LatentPages,
    **facts: Any,
) -> Float[Array, "A N V"]:
    """Output of a part's tokens."""
    q_nope, q_pe = (q.at[part.tokens].get(mode="fill", fill_value=0) for q in (q_nope, q_pe))
    out = attend_pages(
        jnp.concatenate([heads.absorbed(q_nope), q_pe], axis=-1),
        latents.pages,
        None,
        part.over(latents.page_table),
        latent=True,
        layer_index=latents.layer_index,
        k_scale=latents.scale,
        schedule=part.schedule,
        **facts,
    )
    return heads.values(out)
