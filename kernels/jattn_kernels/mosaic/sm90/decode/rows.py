"""Query rows of decode, one kv head after another, in whole blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.mosaic.sm90.decode.tile_sizes import DecodeTiles
from jattn_kernels.spec import AttentionSpec


def by_head(
    q: Float[Array, "B Q N H"], spec: AttentionSpec, sizes: DecodeTiles, *, shared: bool
) -> Float[Array, "B rows H"]:
    """The rows of one kv head after another, each head's padded to whole blocks unless several share one."""
    batch_size, num_tokens, _, head_dim = q.shape
    if shared:
        return q.reshape(batch_size, spec.num_q_heads, head_dim)
    rows = q.reshape(batch_size, num_tokens, spec.num_kv_heads, spec.group_size, head_dim).swapaxes(1, 2)
    rows = rows.reshape(batch_size, spec.num_kv_heads, num_tokens * spec.group_size, head_dim)
    return padded(rows, sizes, axis=2).reshape(batch_size, -1, head_dim)


def padded(x: jax.Array, sizes: DecodeTiles, axis: int = 1) -> jax.Array:
    """With whole blocks of rows on an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % sizes.block_rows)
    return jnp.pad(x, widths)
