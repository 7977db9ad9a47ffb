"""Merging attention over parts of the keys, lse in base 2 as FlashInfer has it."""

import jax.numpy as jnp
from jaxtyping import Array, Float

import jattn_kernels
from jattn_kernels import lse_from_base2, lse_to_base2


def merge_state(
    v_a: Float[Array, "T N H"],
    s_a: Float[Array, "T N"],
    v_b: Float[Array, "T N H"],
    s_b: Float[Array, "T N"],
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Output and base-2 lse over all keys from those of two disjoint parts; -inf marks an empty part.

    Raises:
        ValueError: The shapes do not belong together.
    """
    out, lse = jattn_kernels.merge_state(v_a, lse_from_base2(s_a), v_b, lse_from_base2(s_b))
    return out, lse_to_base2(lse)


def merge_states(
    v: Float[Array, "T parts N H"], s: Float[Array, "T parts N"]
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """As `merge_state`, of any number of parts.

    Raises:
        ValueError: The shapes do not belong together.
    """
    out, lse = jattn_kernels.merge_states(jnp.moveaxis(v, 1, 0), jnp.moveaxis(lse_from_base2(s), 1, 0))
    return out, lse_to_base2(lse)
