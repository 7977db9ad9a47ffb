"""The face that a model shows to the serving loop, and how one is found by its architecture's name."""

from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jaxtyping import Array, Float

from jattn.backend import AttentionBackend, AttentionLayer
from jattn.checkpoint import Checkpoint
from jattn.device_mesh import own_devices, side_by_side
from jattn.forward_batch import ForwardBatch
from jattn.kv_pool import KVGroupSpec, KVPool
from jattn.mailbox import connect
from jattn.parallel import ONE_DEVICE, Parallel

# Models that are near relatives of those that are built, and what keeps them from being served.
_NOT_BUILT: dict[str, str] = {
    "DeepseekV32ForCausalLM": "sparse attention by an indexer",
    "GlmMoeDsaForCausalLM": "sparse attention by an indexer",
}


@runtime_checkable
class CausalLM(Protocol):
    """A Flax nnx module that turns tokens into logits through a backend and a pool.

    One that several devices share has a method `best_token` too: `Parallel.best_token` of its logits after hidden
    states; and, if its kernels may exchange by a mailbox, an attribute `peers` (`jattn.mailbox`), None at first. One
    whose weights may be quantised while they are loaded has a tuple `quantizations` of what to, and minds its
    checkpoint's `quantization`.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_len(self) -> int:
        """Positions that the model was made for, in tokens."""
        ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """One of each kind of attention layer, its `layer_id` 0."""
        ...

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """The pool that the model's layers need."""
        ...

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, *, dtype: Any, parallel: Parallel = ONE_DEVICE, rank: int = 0
    ) -> "CausalLM":
        """The model with a checkpoint's weights, held and computed in `dtype`; of several devices, one's share of it.

        Args:
            rank: The device's number along `parallel`'s axis.
        """
        ...

    def __call__(
        self, forward_batch: ForwardBatch, metadata: Any, backend: AttentionBackend, pool: KVPool
    ) -> tuple[Float[Array, "T D"], KVPool]:
        """The last hidden states, after the final norm, and the pool with this pass's keys and values."""
        ...

    def compute_logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """float32 logits of the chosen hidden states."""
        ...


def load_model(checkpoint: Checkpoint, *, dtype: Any, parallel: Parallel = ONE_DEVICE) -> CausalLM:
    """The model with a checkpoint's weights, held and computed in `dtype`; of several devices, each one's share on it.

    No device ever holds more than its share, and one more tensor of it. Of several devices, the model's arrays are the
    shares side by side (`jattn.device_mesh`), and its methods run on all of them at once. Of several processes, each
    reads the shares of its own devices.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: As the model's `from_checkpoint`; or there are fewer
            devices.
    """
    from_checkpoint = _class_for(checkpoint).from_checkpoint  # pyright: ignore[reportAttributeAccessIssue]
    if parallel.axis is None:
        return from_checkpoint(checkpoint, dtype=dtype)
    parts = []
    for rank, device in own_devices(parallel):
        with jax.default_device(device):
            parts.append(nnx.split(from_checkpoint(checkpoint, dtype=dtype, parallel=parallel, rank=rank)))
    model = nnx.merge(parts[0][0], side_by_side([state for _, state in parts], parallel))
    connect(model, parallel)
    return model


def model_without_weights(checkpoint: Checkpoint, *, dtype: Any, parallel: Parallel = ONE_DEVICE) -> CausalLM | None:
    """What the checkpoint's configuration alone tells of its model: sizes, groups, layers; no weight is read.

    Of several devices, it is what each one has.

    None where the model's class has no classmethod `without_weights`, which takes what `from_checkpoint` does.

    Raises:
        ValueError, NotImplementedError: As `from_checkpoint` of the configuration.
    """
    make = getattr(_class_for(checkpoint), "without_weights", None)
    if make is None:
        return None
    return make(checkpoint, dtype=dtype) if parallel.axis is None else make(checkpoint, dtype=dtype, parallel=parallel)


def _class_for(checkpoint: Checkpoint) -> type:
    """The class of a checkpoint's model, which must be able to hold weights as that is to be held."""
    model = model_class(checkpoint.architecture)
    if checkpoint.quantization not in (None, *getattr(model, "quantizations", ())):
        raise NotImplementedError(
            f"`quantization` must be None for {checkpoint.architecture}, which does not quantise what it loads. "
            f"Got {checkpoint.quantization!r}."
        )
    return model


def model_class(architecture: str) -> type:
    """The class announced for a Hugging Face architecture name (entry points, group `jattn.models`).

    Raises:
        ValueError: No installed package announces it; the message lists those that are.
        NotImplementedError: As much is known of it as that something is not built that it needs.
    """
    known = {point.name: point for point in entry_points(group="jattn.models")}
    if architecture not in known:
        if lacking := _NOT_BUILT.get(architecture):
            raise NotImplementedError(
                f"`architectures` must name a model without {lacking}, which is not built; DeepSeek-V3, R1, V3.1 and "
                f"GLM-4.7-Flash are without. Got {architecture!r}."
            )
        raise ValueError(
            f"The checkpoint's architecture {architecture!r} is unknown. Known: {', '.join(sorted(known)) or 'none'}."
        )
    return known[architecture].load()
