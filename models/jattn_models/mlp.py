"""Multi-layer perceptrons, gated and plain; each device holds its share of the hidden units."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jattn.matmul import NextProduct, Splits, Ungated, is_one_kernel, mlp_of_sum, multiplied, rows_of_room
from jattn.norm import NormedRows, Unnormed
from jattn.parallel import Parallel
from jattn_models.layers import Linear

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def _gate(activation: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda gate, up: activation(gate) * up


GATES = {name: _gate(activation) for name, activation in ACTIVATIONS.items()}


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up side by side in one kernel.

    Few rows on a Hopper GPU have no derivative: their products leave splits.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        dtype: Any,
        rngs: nnx.Rngs,
        parallel: Parallel,
        units_name: str = "`intermediate_size`",
    ):
        self.activation = activation
        units = parallel.share(intermediate_size, units_name)
        self.gate_up_proj = Linear(hidden_size, 2 * units, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(units, hidden_size, bias=bias, summed_over=parallel, dtype=dtype, rngs=rngs)

    def __call__(self, x: NormedRows) -> Float[Array, "T D"]:
        """What this device's hidden units add to the result."""
        return self.down_proj(self._activated(x))

    def splits(self, x: NormedRows) -> Float[Array, "T D"] | Splits:
        """The same, for who adds it up."""
        return self.down_proj.splits(self._activated(x))

    def splits_of_sum(
        self, x: Unnormed, following: NextProduct | None = None
    ) -> tuple[Float[Array, "T D"] | Splits, Float[Array, "T D"], Splits | None]:
        """The same of rows that are added up, and their sum; the last addition may be Unmultiplied.

        And the product that the next layer begins with, where one kernel takes that too.
        """
        if self._is_plain:
            gate_up, down, layer = self._kernels()
            return mlp_of_sum(x, gate_up, down, GATES[self.activation], following=following, layer_index=layer)
        given = dataclasses.replace(x, additions=tuple(map(multiplied, x.additions)))
        hidden, total = self.gate_up_proj.gated_of_sum(given, GATES[self.activation])
        return self.down_proj.splits(hidden), total, None

    def is_one_kernel(self, x: Unnormed) -> bool:
        """Whether `splits_of_sum` of such rows is one kernel, with the product that is added last."""
        if not self._is_plain:
            return False
        gate_up, down, layer = self._kernels()
        return is_one_kernel(x, gate_up, down, GATES[self.activation], layer_index=layer)

    def left_in_one(self, x: Float[Array, "1 D"]) -> Splits:
        """Nothing, in the shape of what that kernel leaves, or with more room."""
        width = x.shape[1]
        parts = jnp.zeros((1, rows_of_room(width, self.down_proj.inputs), width), jnp.float32)
        return Splits(parts=parts, num_rows=1, dtype=x.dtype)

    @property
    def _is_plain(self) -> bool:
        """Whether no bias is added."""
        return self.gate_up_proj.bias is None and self.down_proj.bias is None

    def _kernels(self) -> tuple[Any, Any, Any]:
        """Both projections' weights, and the layer's number."""
        (gate_up, layer), (down, _) = self.gate_up_proj.weights(), self.down_proj.weights()
        return gate_up, down, layer

    def adds_up(self, x: Unnormed) -> bool:
        """Whether its first projection's kernel adds such rows up."""
        return self.gate_up_proj.adds_up(x)

    def _activated(self, x: NormedRows) -> Float[Array, "T F"] | Ungated:
        return self.gate_up_proj.gated(x, GATES[self.activation])

    @property
    def rounds_rows(self) -> bool:
        """Whether it rounds what it is given to fp8 first."""
        return self.gate_up_proj.rounds_rows

    @property
    def in_int4(self) -> bool:
        """Whether its last projection is; of one row one kernel may take both."""
        return self.down_proj.in_int4

    @property
    def in_few_bits(self) -> bool:
        """Whether its last projection is, whose kernels leave sums to be added up."""
        return self.down_proj.scales is not None


class PlainMLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool = False,
        dtype: Any,
        rngs: nnx.Rngs,
        parallel: Parallel,
    ):
        self.activation = activation
        units = parallel.share(intermediate_size, "`intermediate_size`")
        self.up_proj = Linear(hidden_size, units, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(units, hidden_size, bias=bias, summed_over=parallel, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """What this device's hidden units add to the result."""
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))
