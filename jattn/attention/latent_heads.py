"""LatentHeads: the up-projections of latent attention, and what both of its forms do with them."""

import jax.numpy as jnp
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

    def keys_and_values(self, rows: Float[Array, "S W"]) -> tuple[Float[Array, "S N H"], Float[Array, "S N V"]]:
        """Of each row the keys of all heads, with what turns, which they share, behind the rest; and the values."""
        c_kv, k_pe = jnp.split(rows, (self.k_up.shape[-1],), axis=-1)
        k_nope = jnp.einsum("sc,ndc->snd", c_kv, self.k_up, precision=precision(rows))
        k_pe = jnp.broadcast_to(k_pe[:, None], (*k_nope.shape[:2], k_pe.shape[-1]))
        values = jnp.einsum("sc,nvc->snv", c_kv, self.v_up, precision=precision(rows))
        return jnp.concatenate([k_nope, k_pe], axis=-1), values
