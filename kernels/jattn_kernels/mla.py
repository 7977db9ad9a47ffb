"""The faces of absorbed multi-head latent attention: one latent row a token serves as key and value of all heads."""

from typing import Any, Unpack

from jaxtyping import Array, Float, Int, Shaped

from jattn_kernels.operands import AttentionOperands, AttentionOptions, LatentKwargs, names_options
from jattn_kernels.serve import attend
from jattn_kernels.shapes.latent import check_mla_decode, check_mla_extend
from jattn_kernels.spec import AttentionSpec


@names_options(LatentKwargs)
def mla_decode(
    q_nope: Float[Array, "B Q N C"],
    q_pe: Float[Array, "B Q N R"],
    latent_pages: Shaped[Array, "*L P page_size W"],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    *,
    spec: AttentionSpec,
    return_lse: bool = False,
    schedule: Any = None,
    implementation: str | None = None,
    **options: Unpack[LatentKwargs],
) -> Float[Array, "B Q N C"] | tuple[Float[Array, "B Q N C"], Float[Array, "B Q N"]]:
    """Absorbed MLA of the last Q tokens of each sequence over its latent pages (DeepSeek-V2, section 2.1).

    Args:
        q_nope: Queries that have taken up the key's up-projection, as wide as the compressed rows (512 in DeepSeek).
        q_pe: The rotated part of the queries (64 in DeepSeek).
        latent_pages: Rows of [compressed KV, rotated key], with a leading layer axis exactly if `layer_index` is given.
            A row is the key; its first C numbers are the value. Rows of bytes are packed (`packed_latents.py`).
        spec: num_kv_heads 1, head_dim C + R, v_head_dim C, and the model's own `sm_scale`.
        kv_scale: Factor of fp8 rows, which are keys and values in one: a scalar, [1], or [L, 1] with `layer_index`;
            None over packed ones.
        schedule: As in `paged_decode`, made for `operation` "mla_decode".
        Others: As in `paged_decode`.

    Returns:
        As `paged_decode`; the value's up-projection is left to the caller.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`.
    """
    given = _options(dict(options))
    page_size = check_mla_decode(q_nope, q_pe, latent_pages, page_table, seq_lens, given, spec)
    operands = AttentionOperands(
        q=q_nope, q_pe=q_pe, k=latent_pages, page_table=page_table, seq_lens=seq_lens, options=given
    )
    return attend(
        "mla_decode",
        operands,
        spec=spec,
        page_size=page_size,
        schedule=schedule,
        return_lse=return_lse,
        implementation=implementation,
    )


@names_options(LatentKwargs)
def mla_extend(
    q_nope: Float[Array, "T N C"],
    q_pe: Float[Array, "T N R"],
    latent_pages: Shaped[Array, "*L P page_size W"],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    *,
    spec: AttentionSpec,
    return_lse: bool = False,
    schedule: Any = None,
    implementation: str | None = None,
    **options: Unpack[LatentKwargs],
) -> Float[Array, "T N C"] | tuple[Float[Array, "T N C"], Float[Array, "T N"]]:
    """Absorbed MLA of ragged queries, the last of each sequence, over its latent pages.

    Args:
        cu_q_lens: As in `paged_extend`.
        schedule: As in `paged_extend`, made for `operation` "mla_extend".
        Others: As in `mla_decode`.

    Returns:
        As `mla_decode`.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`.
    """
    given = _options(dict(options))
    page_size = check_mla_extend(q_nope, q_pe, latent_pages, page_table, seq_lens, cu_q_lens, given, spec)
    operands = AttentionOperands(
        q=q_nope,
        q_pe=q_pe,
        k=latent_pages,
        page_table=page_table,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        options=given,
    )
    return attend(
        "mla_extend",
        operands,
        spec=spec,
        page_size=page_size,
        schedule=schedule,
        return_lse=return_lse,
        implementation=implementation,
    )


def _options(given: dict[str, Any]) -> AttentionOptions:
    """A row is a key and a value, and its scale both of theirs."""
    kv_scale = given.pop("kv_scale", None)
    return AttentionOptions(k_scale=kv_scale, v_scale=kv_scale, **given)
