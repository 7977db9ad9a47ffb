"""The faces of absorbed multi-head latent attention: one latent row a token serves as key and value of all heads."""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from jattn_kernels import mla_shapes
from jattn_kernels.attention import chosen
from jattn_kernels.call import AttentionOptions
from jattn_kernels.spec import AttentionSpec


def mla_decode(
    q_nope: Float[Array, "B Q N C"],
    q_pe: Float[Array, "B Q N R"],
    latent_pages: Float[Array, "*L P page_size W"],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    *,
    spec: AttentionSpec,
    schedule: Any = None,
    layer_index: Int[Array, ""] | int | None = None,
    q_start: Int[Array, " B"] | None = None,
    kv_start: Int[Array, " B"] | None = None,
    q_positions: Int[Array, "B Q"] | None = None,
    custom_mask: Bool[Array, " M"] | None = None,
    q_scale: Float[Array, "..."] | None = None,
    kv_scale: Float[Array, "..."] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B Q N C"] | tuple[Float[Array, "B Q N C"], Float[Array, "B Q N"]]:
    """Absorbed MLA of the last Q tokens of each sequence over its latent pages (DeepSeek-V2, section 2.1).

    Args:
        q_nope: Queries that have taken up the key's up-projection, as wide as the compressed rows (512 in DeepSeek).
        q_pe: The rotated part of the queries (64 in DeepSeek).
        latent_pages: Rows of [compressed KV, rotated key], with a leading layer axis exactly if `layer_index` is given.
            A row is the key; its first C numbers are the value.
        spec: num_kv_heads 1, head_dim C + R, v_head_dim C, and the model's own `sm_scale`.
        kv_scale: Factor of fp8 rows, which are keys and values in one: a scalar, [1], or [L, 1] with `layer_index`.
        Others: As in `paged_decode`.

    Returns:
        As `paged_decode`; the value's up-projection is left to the caller.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`.
    """
    options = AttentionOptions(
        layer_index=layer_index,
        q_start=q_start,
        kv_start=kv_start,
        q_positions=q_positions,
        custom_mask=custom_mask,
        q_scale=q_scale,
        k_scale=kv_scale,
        v_scale=kv_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        schedule=schedule,
    )
    page_size = mla_shapes.check_mla_decode(q_nope, q_pe, latent_pages, page_table, seq_lens, options, spec)
    run = chosen("mla_decode", q_nope, latent_pages, page_size, options, spec, implementation)
    out, lse = run(q_nope, q_pe, latent_pages, page_table, seq_lens, options, spec=spec, page_size=page_size)
    return (out, lse) if return_lse else out


def mla_extend(
    q_nope: Float[Array, "T N C"],
    q_pe: Float[Array, "T N R"],
    latent_pages: Float[Array, "*L P page_size W"],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    *,
    spec: AttentionSpec,
    schedule: Any = None,
    layer_index: Int[Array, ""] | int | None = None,
    q_start: Int[Array, " B"] | None = None,
    kv_start: Int[Array, " B"] | None = None,
    q_positions: Int[Array, " T"] | None = None,
    custom_mask: Bool[Array, " M"] | None = None,
    q_scale: Float[Array, "..."] | None = None,
    kv_scale: Float[Array, "..."] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "T N C"] | tuple[Float[Array, "T N C"], Float[Array, "T N"]]:
    """Absorbed MLA of ragged queries, the last of each sequence, over its latent pages.

    Args:
        cu_q_lens: As in `paged_extend`.
        Others: As in `mla_decode`.

    Returns:
        As `mla_decode`.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`.
    """
    options = AttentionOptions(
        layer_index=layer_index,
        q_start=q_start,
        kv_start=kv_start,
        q_positions=q_positions,
        custom_mask=custom_mask,
        q_scale=q_scale,
        k_scale=kv_scale,
        v_scale=kv_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        schedule=schedule,
    )
    page_size = mla_shapes.check_mla_extend(q_nope, q_pe, latent_pages, page_table, seq_lens, cu_q_lens, options, spec)
    run = chosen("mla_extend", q_nope, latent_pages, page_size, options, spec, implementation)
    out, lse = run(q_nope, q_pe, latent_pages, page_table, seq_lens, cu_q_lens, options, spec=spec, page_size=page_size)
    return (out, lse) if return_lse else out
