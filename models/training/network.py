"""The model in training: its parameters, its loss over whole sequences, and its way back to a checkpoint's tensors."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer, models

from jattn.checkpoint import Checkpoint
from jattn_models.llama import LlamaForCausalLM

from .checkpoint_files import first_weights, tensor_shapes, write_checkpoint
from .dense_attention import DenseCausalBackend, dense_batch


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """The model as pure functions of its parameters.

    Attributes:
        graph: The model without its arrays.
        rest: The model's arrays that are not trained.
        first_parameters: Where training starts, float32.
        places: Like the parameters: each weight's place in the checkpoint's tensors laid end to end.
    """

    graph: nnx.GraphDef
    rest: Any
    first_parameters: Any
    places: Any

    @classmethod
    def first(cls, seed: int) -> "Network":
        """An untrained model, its weights loaded from a checkpoint as any other's are."""
        graph, parameters, rest = nnx.split(_load(first_weights(seed)), nnx.Param, ...)
        _, places, _ = nnx.split(_load(_numbered()), nnx.Param, ...)
        return cls(graph, rest, parameters, jax.tree.map(lambda x: np.asarray(x, np.int64), places))

    def logits(self, parameters) -> Callable[[Int[Array, "B S"]], Float[Array, "T V"]]:
        """From tokens to logits, sequence after sequence."""

        def apply(tokens):
            model = nnx.merge(self.graph, parameters, self.rest)
            batch = dense_batch(tokens)
            backend = DenseCausalBackend(tokens.shape[1])
            hidden, _ = model(batch, backend.init_forward_metadata(batch), backend, None)
            return model.compute_logits(hidden)

        return apply

    def loss(self, parameters, inputs: Int[Array, "B S"], targets: Int[Array, "B S"]) -> Float[Array, ""]:
        """Mean nats per token, computed in bfloat16 from float32 parameters."""
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters)
        return self._token_losses(narrow, inputs, targets).mean()

    def row_losses(self, parameters) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
        """The summed loss of each row of (inputs, targets, weights), in the parameters' dtype."""

        @jax.jit
        def sums(parameters, inputs, targets, weights):
            losses = self._token_losses(parameters, inputs, targets)
            return jnp.sum(losses.reshape(weights.shape) * weights, axis=1)

        def call(inputs, targets, weights):
            with jax.default_matmul_precision("highest"):
                return np.asarray(sums(parameters, inputs, targets, weights))

        return call

    def is_matrix(self, parameters):
        """For each parameter, whether the checkpoint's tensor is a matrix: what weight decay is for."""
        ends = np.cumsum([int(np.prod(shape)) for shape in tensor_shapes().values()])
        ranks = [len(shape) for shape in tensor_shapes().values()]
        return jax.tree.map(lambda place: ranks[int(np.searchsorted(ends, place.min(), "right"))] > 1, self.places)

    def rounded(self, parameters):
        """The parameters as the checkpoint will hold them, in float32."""
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), parameters)

    def tensors(self, parameters) -> dict[str, np.ndarray]:
        """The parameters under their names in the checkpoint."""
        shapes = tensor_shapes()
        flat = np.full(sum(int(np.prod(shape)) for shape in shapes.values()), np.nan, np.float32)
        for place, value in zip(jax.tree.leaves(self.places), jax.tree.leaves(parameters), strict=True):
            flat[place] = np.asarray(value)
        assert not np.isnan(flat).any(), "a tensor of the checkpoint has no parameter, or training diverged"
        return _cut(flat)

    def _token_losses(self, parameters, inputs, targets) -> Float[Array, " T"]:
        logits = self.logits(parameters)(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets.reshape(-1))


def _load(weights: dict[str, np.ndarray]) -> nnx.Module:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(pathlib.Path(folder), Tokenizer(models.BPE()), weights, np.float32)
        return LlamaForCausalLM.from_checkpoint(Checkpoint(pathlib.Path(folder)), dtype=jnp.float32)


def _numbered() -> dict[str, np.ndarray]:
    """Every weight is its own number: what the loader makes of them says where each one goes."""
    count = sum(int(np.prod(shape)) for shape in tensor_shapes().values())
    assert count <= 2**24, "float32 counts no further"
    return _cut(np.arange(count, dtype=np.float32))


def _cut(flat: np.ndarray) -> dict[str, np.ndarray]:
    tensors, start = {}, 0
    for name, shape in tensor_shapes().items():
        end = start + int(np.prod(shape))
        tensors[name] = flat[start:end].reshape(shape)
        start = end
    return tensors
