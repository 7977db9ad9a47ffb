"""Decoder: layers stacked by kind and scanned; what a family adds is its configuration and its tensors' names."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jattn.backend import AttentionBackend, AttentionLayer
from jattn.checkpoint import QUANTIZATIONS, Checkpoint
from jattn.forward_batch import ForwardBatch
from jattn.kv_pool import KVGroupSpec, KVPool
from jattn.parallel import ONE_DEVICE, Parallel
from jattn_models import tensor_names, weights
from jattn_models.attention import Pass
from jattn_models.decoder_config import DecoderConfig
from jattn_models.decoder_layer import DecoderLayer, Stream, norm_of
from jattn_models.experts import MixtureOfExperts
from jattn_models.few_bits import hold_in_few_bits
from jattn_models.layer_pattern import LayerKind, places_among
from jattn_models.layers import OfLayer, ReadInPlace, Vocabulary
from jattn_models.norms import RMSNorm
from jattn_models.sharding import Rank
from jattn_models.stored_tensors import StoredTensors


class Decoder(nnx.Module):
    """A language model of such layers; a `jattn.model.CausalLM`. A family is a subclass.

    Args:
        config: The model's facts.
        dtype: Of the weights and of the computation; norms, angles and logits are float32.
        rngs: For random weights.
        parallel: This device's share of the model.

    Attributes:
        quantizations: What weights may be quantised to while they are loaded (`Checkpoint.quantized`).
        config_class: Reads the family's config.json.
        layer_class: Takes what DecoderLayer takes.
        layers: One module a stack of layers of the same kind (`DecoderConfig.stacks`).
        peers: A variable with the device's row of a mailbox's table, where several devices have one (`jattn.mailbox`).
    """

    quantizations: ClassVar[tuple[str, ...]] = QUANTIZATIONS
    config_class: ClassVar[type[DecoderConfig]] = DecoderConfig
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, config: DecoderConfig, *, dtype: Any, rngs: nnx.Rngs, parallel: Parallel = ONE_DEVICE):
        self.config = config
        self.parallel = parallel
        self.vocabulary = Vocabulary(
            config.vocab_size, config.hidden_size, tied=config.tied, dtype=dtype, rngs=rngs, parallel=parallel
        )

        def stacked(layers: range, kind: LayerKind) -> DecoderLayer:
            @nnx.split_rngs(splits=len(layers))
            @nnx.vmap
            def make(rngs: nnx.Rngs) -> DecoderLayer:
                return self.layer_class(config, kind, dtype=dtype, rngs=rngs, parallel=parallel)

            return make(rngs)

        self.peers: Any = None
        self.layers = nnx.List([stacked(layers, kind) for layers, kind in config.stacks])
        self.norm = norm_of(config, dtype)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, *, dtype: Any, parallel: Parallel = ONE_DEVICE, rank: int = 0
    ) -> "Decoder":
        """The model with a checkpoint's weights, held and computed in `dtype`; of several devices, one's share of it.

        Args:
            rank: The device's number along `parallel`'s axis.

        Raises:
            ValueError: The configuration, a tensor or the number of devices does not fit; the message names it.
            NotImplementedError: The model needs something that is not built.
        """
        device = Rank(rank, parallel.size)
        abstract = cls.without_weights(checkpoint, dtype=dtype, parallel=parallel)
        graph, state = nnx.split(abstract)
        sources, stored = abstract.sources(), StoredTensors(checkpoint, abstract.config.quantization)
        unread = cls.unread_tensors(abstract.config)
        return nnx.merge(graph, weights.load(state, sources, stored, unread=unread, rank=device))

    @classmethod
    def without_weights(cls, checkpoint: Checkpoint, *, dtype: Any, parallel: Parallel = ONE_DEVICE) -> "Decoder":
        """The model as its configuration describes it, with shapes in place of arrays; raises as `from_checkpoint`."""
        config = cls.config_class.from_dict(checkpoint.config)
        if checkpoint.max_context_len is not None:
            config = config.for_context(checkpoint.max_context_len)
        model = nnx.eval_shape(lambda: cls(config, dtype=dtype, rngs=nnx.Rngs(0), parallel=parallel))
        hold_in_few_bits(model, model.sources(), StoredTensors(checkpoint, config.quantization))
        return model

    def sources(self) -> dict[weights.Path, weights.Source]:
        """Where each of the model's leaves lies in a checkpoint."""
        return tensor_names.of_model(self.config, self.layer_tensors, by_expert=self.parallel.by_expert)

    @classmethod
    def layer_tensors(cls, config: Any, kind: LayerKind) -> dict[weights.Path, weights.Source]:
        """For each leaf of a layer its source in the checkpoint, tensors named from the layer's own prefix on."""
        return tensor_names.of_layer(config)

    @classmethod
    def unread_tensors(cls, config: Any) -> tuple[str, ...]:
        """How the names of tensors begin that a checkpoint may have and the model has no place for."""
        return ("lm_head.weight",) if config.tied else ()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_len(self) -> int:
        """Positions that the model was made for, in tokens."""
        return self.config.context_len

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """One of each kind that attends differently."""
        return tuple(dict.fromkeys(stack.attention.layer(0) for stack in self.layers))

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """One group for each span of attention: the keys of all layers have one shape."""
        stacks, groups = list(zip(self.layers, self.config.stacks, strict=True)), []
        for span in self.config.spans:
            of_span = [(stack.attention, len(layers)) for stack, (layers, kind) in stacks if kind.span == span]
            groups.append(of_span[0][0].kv_group(sum(count for _, count in of_span)))
        return tuple(groups)

    def __call__[Pool: KVPool | None](
        self, forward_batch: ForwardBatch, metadata: Any, backend: AttentionBackend, pool: Pool
    ) -> tuple[Float[Array, "T D"], Pool]:
        """The last hidden states, after the final norm, and the pool with this pass's keys and values.

        Args:
            pool: Whatever the backend takes for one; None passes through.
        """
        positions = forward_batch.positions
        this_pass = Pass(
            forward_batch,
            metadata,
            backend,
            {name: rope.angles(positions) for name, rope in self.config.ropes.items()},
            self._connected,
        )
        hidden = self.vocabulary.embed(forward_batch.input_ids, this_pass.parallel)
        if self.config.embedding_scale != 1.0:
            hidden *= jnp.asarray(self.config.embedding_scale, hidden.dtype)
        stream, stacks = Stream(hidden), list(self.layers)
        for places in places_among(self.config.segments):
            period, stacks = stacks[: len(places)], stacks[len(places) :]
            stream, pool = _scanned(period, places, stream, this_pass, pool)
        return self._last_norm(stream, this_pass.parallel), pool

    def compute_logits(self, hidden: Float[Array, "B D"]) -> Float32[Array, "B V"]:
        """float32 logits of the chosen hidden states."""
        return self._connected.gather_logits(self._local_logits(hidden))

    def best_token(self, hidden: Float[Array, "B D"]) -> Int32[Array, " B"]:
        """The likeliest token after each, or NO_TOKEN (`Parallel.best_token`); no logits go between devices."""
        return self._connected.best_token(self._local_logits(hidden))

    def _last_norm(self, stream: Stream, parallel: Parallel) -> Float[Array, "T D"]:
        if stream.addition is None or not isinstance(self.norm, RMSNorm):
            return self.norm(stream.summed(parallel))
        _, normed = self.norm.of_sum(stream.rows, stream.addition, parallel=parallel, rounded=False)
        assert isinstance(normed, jax.Array)
        return normed

    @property
    def _connected(self) -> Parallel:
        """The devices, as they exchange where this is traced."""
        return self.parallel if self.peers is None else self.parallel.connected(self.peers[...])

    def _local_logits(self, hidden: Float[Array, "B D"]) -> Float32[Array, "B V_local"]:
        """Those of this device's part of the vocabulary."""
        logits, cap = self.vocabulary.logits(hidden) * self.config.logit_scale, self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _scanned(period: Sequence[DecoderLayer], places: Sequence[range], stream: Stream, this_pass: Pass, pool):
    """A segment's layers: a loop over its periods, the layers of one period in turn.

    The loop's own counter tells the layer: one from an array of them would be copied out of it for each layer. So would
    what is `ReadInPlace`: weights, biases, scales of norms, sinks.

    Args:
        places: Of each stack of the period, its layers' numbers in their group of the pool.
    """
    stacks = [nnx.split(stack, ReadInPlace, ...) for stack in period]

    def layer_of(stack, number) -> DecoderLayer:
        graph, in_place, others = stack
        in_place = jax.tree.map(lambda leaf: OfLayer(leaf, number), in_place)
        others = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), others)
        return nnx.merge(graph, in_place, others)

    turns, in_turn = len(places[0]), _in_turn(period, this_pass)
    multiplies = in_turn and all(layer.hands_on(stream.rows, this_pass.parallel) for layer in period)

    def following(offset: int, number: Any) -> DecoderLayer | None:
        if not multiplies:
            return None
        if offset + 1 < len(stacks):
            return layer_of(stacks[offset + 1], number)
        # The last layer may take one of before once more: less time than one layer of another shape costs.
        return layer_of(stacks[0], jnp.minimum(number + 1, turns - 1))

    def body(number, carry):
        stream, pool = carry
        for offset, stack in enumerate(stacks):
            layer = number * places[offset].step + places[offset].start
            stream, pool = layer_of(stack, number)(stream, layer, this_pass, pool, following(offset, number))
        return stream, pool

    parallel, first, is_nothing = this_pass.parallel, 0, False
    left = jax.eval_shape(lambda number: layer_of(stacks[-1], number).left(stream.rows, parallel), 0)
    if multiplies or jax.tree.map(_shaped, stream.addition) != jax.tree.map(_shaped, left):
        stream = Stream(stream.summed(parallel))
        if in_turn and parallel.exchanges:  # nothing is left to the first layer, which therefore exchanges nothing
            first, (stream, pool) = 1, body(jnp.int32(0), (stream, pool))
        else:  # what goes round a loop has one shape: nothing, in the shape of what a layer leaves
            stream, is_nothing = stream._replace(addition=_nothing_like(left)), True
    if stream.rows.shape[0] == 1 and period[-1].hands_on(stream.rows, parallel):
        # Asked of a number such as the loop's, whose type is weak: its body is then traced once for both.
        made = jax.eval_shape(body, 0, (stream, pool))[0]
        if jax.tree.map(_shaped, stream.addition) != jax.tree.map(_shaped, made.addition):  # a kernel leaves more room
            rows = stream.rows if is_nothing else stream.summed(parallel)  # what the segment before has left
            stream = Stream(rows, _nothing_like(made.addition))
        if made.product is not None:
            stream = layer_of(stacks[0], jnp.int32(0)).multiplied(stream, made.product)
    stream, pool = jax.lax.fori_loop(first, turns, body, (stream, pool), unroll=in_turn)
    return stream._replace(product=None), pool


def _nothing_like(addition: Any) -> Any:
    """Zeros in the shape of what a layer leaves."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), addition)


def _shaped(leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], jnp.dtype]:
    return leaf.shape, leaf.dtype


def _in_turn(period: Sequence[DecoderLayer], this_pass: Pass) -> bool:
    """Whether JAX unrolls the loop over layers.

    XLA unrolls it too (`jattn.step_compilation.compiler_options`), but late, and keeps a kernel a layer for the loop's
    counter, and views of weights that the host makes: two H200s share a step of Llama-3-8B in 2.83 ms instead of 3.00.
    A mixture's step of several tokens gains 2 %, and takes XLA twice the time: its loop is left to XLA.
    """
    batch = this_pass.forward_batch
    of_mixtures = any(isinstance(layer.mlp, MixtureOfExperts) for layer in period)
    return batch.unrolled and (batch.input_ids.shape[0] == 1 or not of_mixtures)
