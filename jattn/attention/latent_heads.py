"""LatentHeads: the up-projections of latent attention, and what both of its forms do with them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn.matmul import precision
from jattn.pytree import pytree


@pytree()
class LatentHeads:
    """What makes keys and values of heads from latent rows: one layer's projections, of the heads on this device.

    Attributes:
        k_up: Of the part of a key that does not turn.
        v_up: Of a value.
    """

    k_up: Float[Array, "N D C"]
    v_up: Float[Array, "N V C"]

    def absorbed(self, q_nope: Float[Array, "T N D"]) -> Float[Array, "T N C"]:
        """Queries that have taken up the keys' projection, to be multiplied with the rows themselves."""
        return jnp.einsum("tnd,ndc->tnc", q_nope, self.k_up, precision=precision(q_nope))

    def values(self, out: Float[Array, "T N C"]) -> Float[Array, "T N V"]:
        """The output of heads, from means of rows."""
        return jnp.einsum("tnc,nvc->tnv", out, self.v_up, precision=precision(out))

    def expansion(self, width: int) -> "Expansion":
        """What makes keys and values of rows of so many numbers."""
        heads, _, latent = self.k_up.shape
        turned = jnp.eye(width - latent, width, latent, dtype=self.k_up.dtype)
        k_up, v_up = (jnp.pad(up, ((0, 0), (0, 0), (0, width - latent))) for up in (self.k_up, self.v_up))
        turned = jnp.broadcast_to(turned[None], (heads, *turned.shape))
        return Expansion(jnp.concatenate([k_up, turned], axis=1), v_up)


@pytree()
class Expansion:
    """Products of whole rows: what turns is copied into each head's key by ones, and is nothing to values.

    So keys are written once, as they are attended to: put together of two parts they would be read and written again.
    """

    k: Float[Array, "N H W"]
    v: Float[Array, "N V W"]

    def keys_and_values(self, rows: Float[Array, "S W"]) -> tuple[Float[Array, "S N H"], Float[Array, "S N V"]]:
        """Of each row the keys of all heads, with what turns, which they share, behind the rest; and the values."""
        keys = jnp.einsum("sw,nhw->snh", rows, self.k, precision=precision(rows))
        # Products of the same rows, XLA would make one, and copies of its two parts.
        values = jnp.einsum("sw,nvw->snv", lax.optimization_barrier(rows), self.v, precision=precision(rows))
        return keys, values
