"""Temperature: queries scaled by their position, in layers without a rotary embedding."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Queries that grow with their position, so that attention stays peaked over long texts (arXiv:2501.19399).

    Attributes:
        scale: How much they grow with the logarithm of the position.
        floor: Tokens between one size and the next.
    """

    scale: float
    floor: float

    def __call__(self, positions: Int[Array, " T"]) -> Float32[Array, " T"]:
        """The factor on each token's query."""
        return 1.0 + self.scale * jnp.log1p(jnp.floor((positions.astype(jnp.float32) + 1.0) / self.floor))
