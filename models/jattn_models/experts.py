"""MixtureOfExperts: a router sends each token to a few of many gated MLPs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jattn.experts import Pages, mixture_of_experts, routed_experts, routed_experts_of_sum
from jattn.matmul import NextProduct, QuantizedKernel, QuantizedRows, Splits, multiplied
from jattn.norm import Unnormed, summed_and_normed
from jattn.parallel import Parallel
from jattn.routing import Routing
from jattn_models.layers import Linear, ReadInPlace, random_weights
from jattn_models.mlp import GatedMLP
from jattn_models.router import Router


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """(up + 1) * gate * sigmoid(alpha * gate), gpt-oss's; static and hashable.

    Attributes:
        limit: The most that a gate is, and that up is in size.
        alpha: Factor on the gate in the sigmoid.
    """

    limit: float
    alpha: float

    def __call__(self, gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The facts of a mixture; static and hashable.

    Attributes:
        routing: How many experts there are, and which of them a token goes to.
        intermediate_size: Hidden units of one expert.
        activation: What stands between an expert's projections; silu(gate) * up if None.
        biased: Whether an expert's projections have biases.
        router_biased: Whether the router's logits have a bias.
        choice_biased: Whether its scores have one for the choice of experts alone.
        weighs_inputs: Whether the weight is on what an expert is given, not on what it returns.
        shared_size: Hidden units of an expert that every token goes to beside its own; None for no such expert.
        shared_gated: Whether what the shared expert returns is weighed by the sigmoid of a learned gate.
    """

    routing: Routing
    intermediate_size: int
    activation: ClampedSwiGLU | None = None
    biased: bool = False
    router_biased: bool = False
    choice_biased: bool = False
    weighs_inputs: bool = False
    shared_size: int | None = None
    shared_gated: bool = False

    def __post_init__(self):
        if self.shared_gated and self.shared_size is None:
            raise ValueError("`shared_gated` needs a shared expert. Got shared_size=None.")

    @property
    def joined(self) -> int:
        """Experts like the others that the shared one is made of, if it may be held as such behind them; 0 if not."""
        differs = self.shared_gated or self.biased or self.weighs_inputs or self.activation is not None
        if self.shared_size is None or differs or self.shared_size % self.intermediate_size:
            return 0
        return self.shared_size // self.intermediate_size


class GroupedLinear(nnx.Module):
    """One projection an expert; its kernel is [experts, inputs, outputs], its bias [experts, outputs].

    Attributes:
        scales: Of a kernel in few bits, which is [experts, outputs, inputs], or bytes of two inputs; None of others.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool, dtype: Any, rngs: nnx.Rngs):
        self.kernel = ReadInPlace(random_weights(rngs, (experts, inputs, outputs), dtype)[...])
        self.scales: ReadInPlace | None = None
        self.bias = ReadInPlace(jnp.zeros((experts, outputs), dtype)) if bias else None

    def hold(self, kernel: QuantizedKernel) -> None:
        """Makes place for such weights in place of its own; of shapes alone, as `nnx.eval_shape` gives them."""
        self.kernel, self.scales = ReadInPlace(kernel.values), nnx.data(ReadInPlace(kernel.scales))

    def weights(self) -> tuple[Array | QuantizedKernel, Int[Array, ""] | None]:
        """The kernel, with its scales if it has some, and the number of the layer if it is of all layers'."""
        kernel, layer = self.kernel.stack_and_layer
        if self.scales is None:
            return kernel, layer
        return QuantizedKernel(values=kernel, scales=self.scales.stack_and_layer[0]), layer


class MixtureOfExperts(nnx.Module):
    """The weighted sum of a token's chosen experts; each device holds its share of every expert's hidden units.

    Or some of the experts whole (`Parallel.by_expert`): then it computes what tokens are sent to these. Else a shared
    expert lies behind the others, cut into as many as it is made of (`Experts.joined`): one kernel does all.

    No token is dropped and no shape depends on the router: a token has as many rows as it has experts.
    """

    def __init__(self, hidden_size: int, experts: Experts, *, dtype: Any, rngs: nnx.Rngs, parallel: Parallel):
        joined = 0 if parallel.by_expert else experts.joined
        routing = dataclasses.replace(experts.routing, shared=joined)
        units, count, bias = experts.intermediate_size, routing.all_experts, experts.biased
        if parallel.by_expert:
            count = parallel.share(count, "The number of experts")
        else:
            units = parallel.share(units, "An expert's `intermediate_size`")
        self.parallel = parallel
        self.experts = experts
        self.router = Router(
            hidden_size,
            routing,
            biased=experts.router_biased,
            choice_biased=experts.choice_biased,
            dtype=dtype,
            rngs=rngs,
        )
        self.gate_up_proj = GroupedLinear(count, hidden_size, 2 * units, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = GroupedLinear(count, units, hidden_size, bias=bias, dtype=dtype, rngs=rngs)
        self.shared = (
            None
            if experts.shared_size is None or joined
            else GatedMLP(
                hidden_size,
                experts.shared_size,
                dtype=dtype,
                rngs=rngs,
                parallel=parallel,
                units_name="A shared expert's `intermediate_size`",
            )
        )
        self.shared_gate = Linear(hidden_size, 1, dtype=dtype, rngs=rngs) if experts.shared_gated else None

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """This device's part: one sum over devices for both kinds of experts, as two could overlap."""
        mixed = self.mixed(x)
        return mixed if self.shared is None else mixed + self.shared_expert(x, self.shared)

    def splits(self, x: Float[Array, "T D"]) -> Float[Array, "T D"] | Splits:
        """The same, for who adds it up."""
        if self.shared is not None or self.parallel.by_expert:
            return self(x)
        return self._routed(x, self.router.logits(x), in_splits=True)

    @property
    def takes_attention(self) -> bool:
        """Whether `splits_of_sum` takes a product of rows that are Unattended."""
        return self.shared is None and not self.parallel.by_expert

    def splits_of_sum(
        self, x: Unnormed, following: NextProduct | None
    ) -> tuple[Float[Array, "T D"] | Splits, Float[Array, "T D"], Splits | None, Pages | None]:
        """The same of rows that are added up and normed first, and their sum; the last addition may be Unmultiplied.

        And the product that the next layer begins with, where one kernel takes that too, and pages, as
        `routed_experts_of_sum` returns them.
        """
        if self.shared is not None or self.parallel.by_expert:
            given = dataclasses.replace(x, additions=tuple(map(multiplied, x.additions)))
            total, normed = summed_and_normed(given)
            assert not isinstance(normed, QuantizedRows)
            return self(normed), total, None, None
        gate_up, down, others = self._weights()
        router, choice_bias = self.router, self._choice_bias
        options: dict[str, Any] = {"router_bias": router.bias_stack, "choice_bias": choice_bias, **others}
        options["following"] = following
        return routed_experts_of_sum(x, router.kernel.stack_and_layer[0], router.routing, gate_up, down, **options)

    def mixed(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """The weighted sum of what each token's experts return; this device's part of it."""
        if not self.parallel.by_expert:
            return self._routed(x, self.router.logits(x))
        gate_up, down, options = self._weights()
        weights, chosen = self.router.route(x)
        own = chosen - self.parallel.first_of(gate_up.shape[-3])  # a number that is none here is no expert
        return mixture_of_experts(x, weights, own, gate_up, down, **options)

    def _routed(self, x: Float[Array, "T D"], logits: Float32[Array, "T E"] | Splits, **options: Any) -> Any:
        """The mixture by these logits."""
        gate_up, down, others = self._weights()
        options |= {"choice_bias": self._choice_bias, **others}
        return routed_experts(x, logits, self.router.routing, gate_up, down, **options)

    @property
    def _choice_bias(self) -> Float32[Array, " E"] | None:
        return None if self.router.choice_bias is None else self.router.choice_bias[...]

    def _weights(self) -> tuple[Any, Any, dict[str, Any]]:
        """Both projections' weights, and how they are taken."""
        first, second = self.gate_up_proj, self.down_proj
        biases: dict[str, Any] = {}
        (gate_up, layer), (down, _) = first.weights(), second.weights()
        if first.bias is not None and second.bias is not None:
            (gate_up_bias, _), (down_bias, _) = first.bias.stack_and_layer, second.bias.stack_and_layer
            if not self.parallel.by_expert:  # each device has a part of what the bias is added to
                down_bias = self.parallel.once(down_bias)
            biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        options: dict[str, Any] = {
            "weighs_inputs": self.experts.weighs_inputs,
            "activation": self.experts.activation,
            "layer_index": layer,
            **biases,
        }
        return gate_up, down, options

    def shared_expert(self, x: Float[Array, "T D"], shared: GatedMLP) -> Float[Array, "T D"]:
        """What the expert that every token goes to returns; this device's part of it."""
        if self.shared_gate is None:
            return shared(x)
        weights = jax.nn.sigmoid(self.shared_gate(x, out_dtype=jnp.float32))
        return (shared(x).astype(jnp.float32) * weights).astype(x.dtype)
