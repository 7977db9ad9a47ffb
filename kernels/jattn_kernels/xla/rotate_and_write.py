"""Rotary embedding by given angles, then the write into pages: what XLA makes one fusion each of."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import AttentionCall
from jattn_kernels.head_norms import normed
from jattn_kernels.operands import RotaryOperands
from jattn_kernels.pages import write_pages
from jattn_kernels.rotation import rotated
from jattn_kernels.splits import added


def rotate_and_write(
    call: AttentionCall, operands: RotaryOperands
) -> tuple[Float[Array, "T N H"], Float[Array, "..."], Float[Array, "..."]]:
    """Turned queries, and the pages with the turned keys and the values."""
    spec, qkv, cos, sin = call.spec, added(operands.qkv), operands.cos, operands.sin
    if operands.norms is not None:
        qkv = normed(qkv, operands.norms, spec.num_kv_heads)
    q, k, v = jnp.split(qkv, (spec.num_q_heads, spec.num_q_heads + spec.num_kv_heads), axis=1)
    k_pages, v_pages = write_pages(
        operands.k_pages,
        operands.v_pages,
        rotated(k, cos, sin),
        v,
        operands.slots,
        layout=spec.page_layout,
        layer_index=operands.layer_index,
    )
    assert v_pages is not None
    return rotated(q, cos, sin), k_pages, v_pages
