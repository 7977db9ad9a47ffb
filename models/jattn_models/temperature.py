"""Temperature: queries scaled by their position."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Queries that grow with their position, so that attention stays peaked over long texts (arXiv:2501.19399).

    Attributes:
        scale: How much they grow with the logarithm of the position.
        floor: Tokens between one size and the next.
        first: What the first position counts as.
        of_turning: Whether they grow in layers that turn them too.
    """

    scale: float
    floor: float
    first: float = 1.0
    of_turning: bool = False

    def __call__(self, positions: Int[Array, " T"]) -> Float32[Array, " T"]:
        """The factor on each token's query."""
        return 1.0 + self.scale * jnp.log1p(jnp.floor((positions.astype(jnp.float32) + self.first) / self.floor))
