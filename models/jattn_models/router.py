"""Router: the logits of a mixture's experts for each token, and what is chosen by them."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jattn.matmul import Splits, matmul, matmul_splits
from jattn.routing import Routing, route
from jattn_models.layers import ReadInPlace, random_weights


class Router(nnx.Module):
    """Sends each token to a few of many experts; each device has all of it, and computes the same in float32.

    Args:
        hidden_size: Of a token.
        routing: What becomes of the logits.
        biased: Whether the logits have a bias.
        choice_biased: Whether the scores have one for the choice alone; it is float32, whatever `dtype` is.
    """

    def __init__(
        self, hidden_size: int, routing: Routing, *, biased: bool, choice_biased: bool, dtype: Any, rngs: nnx.Rngs
    ):
        self.routing = routing
        self.kernel = ReadInPlace(random_weights(rngs, (hidden_size, routing.num_experts), dtype)[...])
        self.bias = ReadInPlace(jnp.zeros(routing.num_experts, dtype)) if biased else None
        self.choice_bias = nnx.Param(jnp.zeros(routing.num_experts, jnp.float32)) if choice_biased else None

    def __call__(self, x: Float[Array, "T D"]) -> Float32[Array, "T E"]:
        """A number an expert for each token."""
        stack, layer = self.kernel.stack_and_layer
        logits = matmul(x, stack, layer_index=layer, out_dtype=jnp.float32)
        return logits if self.bias is None else logits + self.bias.of_layer.astype(jnp.float32)[None]

    def logits(self, x: Float[Array, "T D"]) -> Float32[Array, "T E"] | Splits:
        """The same, for who adds it up."""
        stack, layer = self.kernel.stack_and_layer
        return matmul_splits(x, stack, bias=self.bias_stack, layer_index=layer, out_dtype=jnp.float32)

    @property
    def bias_stack(self) -> Float[Array, "*L E"] | None:
        """The logits' bias, of all layers as the kernel is."""
        return None if self.bias is None else self.bias.stack_and_layer[0]

    def route(self, x: Float[Array, "T D"]) -> tuple[Float32[Array, "T k"], Int32[Array, "T k"]]:
        """The weights and the numbers of each token's experts, the best first."""
        return route(self(x), self.routing, bias=None if self.choice_bias is None else self.choice_bias[...])
