"""Rotary embedding outside the attention kernels: alone, and together with the write into pages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall, modes_of
from jattn_kernels.dispatch import choose
from jattn_kernels.head_norms import HeadNorms, check_head_norms
from jattn_kernels.operands import RotaryOperands
from jattn_kernels.rotation import check_angles
from jattn_kernels.shapes.arrays import check_are_arrays, check_axes, check_sizes
from jattn_kernels.shapes.pages import check_page_rows
from jattn_kernels.spec import AttentionSpec, PageLayout
from jattn_kernels.splits import Splits


def rotate_and_write(
    qkv: Float[Array, "T heads H"] | Splits,
    cos: Float[Array, "..."],
    sin: Float[Array, "..."],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    slots: Int[Array, "..."],
    *,
    num_kv_heads: int,
    layout: PageLayout = "NHD",
    layer_index: Int[Array, ""] | int | None = None,
    norms: HeadNorms | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "..."], Float[Array, "..."]]:
    """Queries turned by their angles, and the pages with the turned keys and the values; in place where donated.

    A head's pairs (i, i + half) are turned, in float32; what lies past them stays as it is.

    Args:
        qkv: A token's query heads, then `num_kv_heads` key heads, then as many value heads.
        cos, sin: Of each pair's angle, [T, half] float32.
        slots: As `write_pages` takes them.
        layer_index: Which layer of pages with a leading layer axis; may be traced.
        norms: Of query and key heads before they turn, as `normed_heads` does them.
        implementation: Which one to use; None lets dispatch choose.

    Raises:
        ValueError: A shape or dtype is wrong, or `implementation` is unknown.
        NotImplementedError: The implementation that was asked for refuses.
    """
    check_are_arrays(qkv=qkv, cos=cos, sin=sin)
    check_axes("qkv", qkv, ("T", "heads", "H"))
    check_sizes(num_kv_heads=num_kv_heads)
    num_tokens, num_heads, head_dim = qkv.shape
    num_q_heads = num_heads - 2 * num_kv_heads
    if num_q_heads < 1:
        raise ValueError(
            "`qkv` must have query heads and `num_kv_heads` key and value heads. "
            f"Got qkv.shape={qkv.shape}, num_kv_heads={num_kv_heads}."
        )
    check_angles(cos, sin, "qkv", qkv)
    if norms is not None:
        check_head_norms(norms, head_dim)
    rows = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, head_dim), qkv.dtype)
    facts = check_page_rows(
        k_pages, v_pages, rows, rows, slots, layout=layout, combined_pool=None, layer_index=layer_index
    )
    cos, sin, k_pages, v_pages, slots = (jnp.asarray(x) for x in (cos, sin, k_pages, v_pages, slots))
    qkv = qkv if isinstance(qkv, Splits) else jnp.asarray(qkv)
    operands = RotaryOperands(
        qkv=qkv, cos=cos, sin=sin, k_pages=k_pages, v_pages=v_pages, slots=slots, layer_index=layer_index, norms=norms
    )
    features = {"partial_rotary": 2 * cos.shape[-1] < head_dim, "head_norms": norms is not None}
    call = AttentionCall(
        operation="rotate_and_write",
        spec=AttentionSpec(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_layout=layout),
        q_dtype=qkv.dtype.name,
        kv_dtype=k_pages.dtype.name,
        page_size=facts.page_size,
        num_tokens=num_tokens,
        features=frozenset(name for name, is_given in features.items() if is_given),
        modes=modes_of(operands),
    )
    return choose(call, implementation).implementation.run(call, operands)
