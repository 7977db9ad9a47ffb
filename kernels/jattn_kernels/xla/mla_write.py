"""Latent rows made by jnp, then written into their pages."""

from jaxtyping import Array, Float, Shaped

from jattn_kernels.call import AttentionCall
from jattn_kernels.operands import LatentRowOperands
from jattn_kernels.pages import write_latent_pages


def mla_write(
    call: AttentionCall, operands: LatentRowOperands
) -> tuple[Float[Array, "T W"], Shaped[Array, "*L P page_size bytes"]]:
    """The rows, and the pages that have them."""
    rows, width = operands.latents.made(), call.spec.value_dim
    parts = rows[:, :width], rows[:, width:]
    return rows, write_latent_pages(operands.pages, *parts, operands.slots, layer_index=operands.layer_index)
