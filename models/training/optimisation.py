"""Trainer: AdamW over random windows of a token stream, many steps a compiled call."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from .network import Network


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step takes and returns; donated.

    Attributes:
        parameters: The network's, float32.
        optimiser: The optimiser's own.
        step: Steps done.
    """

    parameters: typing.Any
    optimiser: typing.Any
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trainer:
    """A run's settings; the run itself is a pure function of them.

    Attributes:
        network: What is trained.
        stream: The training tokens, resident on the device.
        steps, batch, window: Steps of the whole run, windows a step, tokens a window.
        learning_rate: After a warm-up of 5 % of the steps; then a cosine to 0.
        weight_decay: On matrices, not on norms.
        token_noise: Probability that an input token is replaced by any token; targets stay.
        vocab_size: Tokens there are.
        seed: Of windows and noise.
    """

    network: Network
    stream: Int[Array, " tokens"]
    steps: int
    batch: int
    window: int
    learning_rate: float
    weight_decay: float
    token_noise: float
    vocab_size: int
    seed: int

    @functools.cached_property
    def optimiser(self) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, warmup_steps=max(1, self.steps // 20), decay_steps=self.steps
        )
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=self.weight_decay, mask=self.network.is_matrix),
        )

    def first(self) -> TrainState:
        """The state before the first step."""
        parameters = jax.tree.map(jnp.copy, self.network.first_parameters)
        return TrainState(parameters, self.optimiser.init(parameters), jnp.int32(0))

    def run(self, state: TrainState, num_steps: int) -> tuple[TrainState, Float[Array, " num_steps"]]:
        """The state `num_steps` later, and each step's loss."""
        return self._run(state, self.stream, num_steps)

    @functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def _run(self, state: TrainState, stream: Int[Array, " tokens"], num_steps: int):
        return jax.lax.scan(lambda state, _: self._step(state, stream), state, length=num_steps)

    def _step(self, state: TrainState, stream: Int[Array, " tokens"]) -> tuple[TrainState, Float[Array, ""]]:
        places, where, what = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), state.step), 3)
        starts = jax.random.randint(places, (self.batch, 1), 0, stream.shape[0] - self.window)
        rows = stream[starts + jnp.arange(self.window + 1)[None, :]]
        noise = jax.random.randint(what, (self.batch, self.window), 0, self.vocab_size, jnp.int32)
        noisy = jax.random.bernoulli(where, self.token_noise, noise.shape)
        inputs = jnp.where(noisy, noise, rows[:, :-1])
        loss, gradient = jax.value_and_grad(self.network.loss)(state.parameters, inputs, rows[:, 1:])
        updates, optimiser = self.optimiser.update(gradient, state.optimiser, state.parameters)
        return TrainState(optax.apply_updates(state.parameters, updates), optimiser, state.step + 1), loss
