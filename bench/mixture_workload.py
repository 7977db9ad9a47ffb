"""Mixtures of experts that can be measured: their weights and draws, and the bytes and FLOPs of a layer."""

import dataclasses
import functools
import math
import zlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bench.workloads import MATMUL_TFLOPS, READ_GBPS, random_normal
from jattn_kernels import routed_experts
from jattn_kernels.routing_spec import Routing

Draw = Literal["uniform", "same", "zipf"]
Weights = tuple[jax.Array, jax.Array]
Tokens = tuple[jax.Array, jax.Array]
_CALLS_US = 3000  # of one executable, about, unless they are too many
_MOST_CALLS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureShapes:
    """Stacked layers of experts in bf16.

    Attributes:
        layers: So many that L2 never holds what a layer will read.
    """

    model: str
    num_experts: int
    per_token: int
    hidden_size: int
    units: int
    layers: int

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights in one layer."""
        return 3 * self.hidden_size * self.units * jnp.dtype(jnp.bfloat16).itemsize

    @property
    def routing(self) -> Routing:
        return Routing(num_experts=self.num_experts, per_token=self.per_token, normalised=True)

    def weights(self) -> Weights:
        """Gates and ups, and downs, of a size that lets what an expert returns be of the size of what it is given."""
        stack = self.layers, self.num_experts
        shapes = (*stack, self.hidden_size, 2 * self.units), (*stack, self.units, self.hidden_size)
        gate_up, down = (
            random_normal(jax.random.key(number), shape, "bfloat16", 1 / math.sqrt(shape[-2]))
            for number, shape in enumerate(shapes)
        )
        return gate_up, down


class HeldWeights:
    """The weights of one model at a time, held from one workload to the next."""

    def __init__(self) -> None:
        self._shapes: MixtureShapes | None = None
        self._weights: Weights | None = None

    def __call__(self, shapes: MixtureShapes) -> Weights:
        """Those of these shapes; any others are free from now on."""
        if self._weights is None or self._shapes != shapes:
            self._weights = None  # before the next are made
            self._shapes, self._weights = shapes, shapes.weights()
        return self._weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureWorkload:
    """Layers of experts one after the other, each over tokens and logits of its own, made beforehand.

    Attributes:
        draw: Who goes where: to any experts alike, all to the same ones, or by Zipf's law (the nth expert of a random
            order is 1 / n as likely as the first).
    """

    shapes: MixtureShapes
    tokens: int
    draw: Draw = "uniform"

    @property
    def name(self) -> str:
        return f"moe_layer_{self.shapes.model}_t{self.tokens}_{self.draw}"

    @property
    def flops(self) -> int:
        """Of all rows' products."""
        shapes = self.shapes
        return 6 * self.tokens * shapes.per_token * shapes.hidden_size * shapes.units

    @property
    def calls(self) -> int:
        """Layers run in one executable: each of the stack as often as any other."""
        of_each = 1 if self.draw == "same" else self.tokens
        about_us = self.roofline_us(min(self.shapes.num_experts, of_each * self.shapes.per_token))
        return self.shapes.layers * max(1, int(min(_MOST_CALLS, _CALLS_US / about_us)) // self.shapes.layers)

    def roofline_us(self, met: float) -> float:
        """Time that a layer takes at least, of so many experts that some token goes to."""
        return max(self.read_bytes(met) / READ_GBPS / 1e3, self.flops / MATMUL_TFLOPS / 1e6)

    def read_bytes(self, met: float) -> float:
        """Weights of so many experts."""
        return met * self.shapes.expert_bytes

    def logits(self) -> np.ndarray:
        """The router's, float32 [calls, tokens, experts], of which the draw is the `per_token` largest."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        experts = self.shapes.num_experts
        noise = random.gumbel(size=(self.calls, self.tokens, experts))  # its largest are drawn without replacement
        match self.draw:
            case "uniform":
                liking = np.zeros(experts)
            case "same":
                liking = np.where(np.arange(experts) < self.shapes.per_token, 100.0, 0.0)
            case "zipf":
                liking = -np.log1p(random.permutation(experts))
        return (noise + liking).astype(np.float32)

    def chosen(self, logits: np.ndarray) -> np.ndarray:
        """The experts that these logits choose, in any order: [calls, tokens, per_token]."""
        return np.argpartition(logits, -self.shapes.per_token, axis=-1)[..., -self.shapes.per_token :]

    def met(self, logits: np.ndarray) -> float:
        """Experts that some token goes to, on the average of the calls."""
        return float(np.mean([np.unique(call).size for call in self.chosen(logits)]))

    def given(self, logits: np.ndarray) -> list[Tokens]:
        """What each call is given: tokens in bf16, and logits."""
        keys = jax.random.split(jax.random.key(2), self.calls)
        xs = [random_normal(key, (self.tokens, self.shapes.hidden_size), "bfloat16") for key in keys]
        return list(zip(xs, map(jnp.asarray, logits), strict=True))

    def call(self, x: jax.Array, logits: jax.Array, weights: Weights, layer: jax.Array, implementation: str | None):
        """One layer, routing and sum included."""
        of_layer = {"layer_index": layer, "implementation": implementation}
        return routed_experts(x, logits, self.shapes.routing, *weights, **of_layer)

    def compiled(
        self, implementation: str | None, options: dict[str, Any] | None = None, *, calls: int | None = None
    ) -> Any:
        """The calls in one executable of what they are given and of weights, each after the one before: outputs.

        Args:
            options: The compiler's.
            calls: The first so many; all if None.
        """
        # One traced function, so that the kernels are lowered once.
        call = jax.jit(functools.partial(self.call, implementation=implementation))

        def run(given: list[Tokens], weights: Weights) -> list[jax.Array]:
            outs: list[jax.Array] = []
            for number, (x, logits) in enumerate(given):
                if outs:
                    x, logits, outs[-1] = jax.lax.optimization_barrier((x, logits, outs[-1]))
                outs.append(call(x, logits, weights, jnp.int32(number % self.shapes.layers)))
            return outs

        x = jax.ShapeDtypeStruct((self.tokens, self.shapes.hidden_size), jnp.bfloat16)
        logits = jax.ShapeDtypeStruct((self.tokens, self.shapes.num_experts), jnp.float32)
        weights = jax.eval_shape(self.shapes.weights)
        return jax.jit(run, compiler_options=options).lower([(x, logits)] * (calls or self.calls), weights).compile()

    def fields(self) -> dict[str, Any]:
        """What names this workload in a row of a record."""
        shapes = dataclasses.asdict(self.shapes)
        return {"case": "moe_layer", "model": shapes.pop("model"), "tokens": self.tokens, "draw": self.draw, **shapes}
