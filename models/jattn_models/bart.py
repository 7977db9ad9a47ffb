"""BART: an encoder read once, and a decoder whose layers attend to it across from their own tokens."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from jattn.backend import AttentionBackend, AttentionLayer, forward
from jattn.checkpoint import Checkpoint
from jattn.forward_batch import ForwardBatch
from jattn.kv_pool import KVGroupSpec, KVPool
from jattn.matmul import precision
from jattn_models import weights
from jattn_models.config_fields import boolean, positive, refuse, with_defaults
from jattn_models.layers import Linear, random_weights
from jattn_models.norms import LayerNorm
from jattn_models.stored_tensors import StoredTensors

_FIRST_POSITION = 2  # of the table of positions; the rows before it are never used
_EPS = 1e-5
_UNREAD = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")  # all tied


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig:
    """The facts of a BART; static and hashable.

    Attributes:
        encoder_layers, decoder_layers: How many there are.
        encoder_heads, decoder_heads: Of each of their layers.
        encoder_units, decoder_units: Hidden units of their MLPs.
        context_len: Positions that encoder and decoder were made for, in tokens.
        embedding_scale: Factor on the embedded tokens.
    """

    vocab_size: int
    hidden_size: int
    encoder_layers: int
    decoder_layers: int
    encoder_heads: int
    decoder_heads: int
    encoder_units: int
    decoder_units: int
    context_len: int
    embedding_scale: float

    def __post_init__(self):
        for name in ("encoder", "decoder"):
            heads = getattr(self, f"{name}_heads")
            if self.hidden_size % heads:
                raise ValueError(
                    f"`d_model` must be a multiple of `{name}_attention_heads`. Got {self.hidden_size} and {heads}."
                )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "BartConfig":
        """The configuration as Hugging Face writes it.

        Raises:
            ValueError: A field is missing or out of range.
            NotImplementedError: The model needs something that is not built.
        """
        fields = with_defaults(config, max_position_embeddings=1024)
        refuse(fields, "activation_function", unless="gelu")
        refuse(fields, "tie_word_embeddings", unless=True)
        hidden_size = positive(fields, "d_model", int)
        return cls(
            vocab_size=positive(fields, "vocab_size", int),
            hidden_size=hidden_size,
            encoder_layers=positive(fields, "encoder_layers", int),
            decoder_layers=positive(fields, "decoder_layers", int),
            encoder_heads=positive(fields, "encoder_attention_heads", int),
            decoder_heads=positive(fields, "decoder_attention_heads", int),
            encoder_units=positive(fields, "encoder_ffn_dim", int),
            decoder_units=positive(fields, "decoder_ffn_dim", int),
            context_len=positive(fields, "max_position_embeddings", int),
            embedding_scale=hidden_size**0.5 if boolean(fields, "scale_embedding", default=False) else 1.0,
        )


class Projections(nnx.Module):
    """The four of an attention."""

    def __init__(self, width: int, heads: int, *, dtype: Any, rngs: nnx.Rngs):
        self.heads = heads
        self.q_proj = Linear(width, width, bias=True, dtype=dtype, rngs=rngs)
        self.kv_proj = Linear(width, 2 * width, bias=True, dtype=dtype, rngs=rngs)
        self.out_proj = Linear(width, width, bias=True, dtype=dtype, rngs=rngs)

    def queries(self, x: Float[Array, "T D"]) -> Float[Array, "T N H"]:
        return self.q_proj(x).reshape(x.shape[0], self.heads, -1)

    def keys_and_values(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T N H"], Float[Array, "T N H"]]:
        k, v = jnp.split(self.kv_proj(x), 2, axis=-1)
        return k.reshape(x.shape[0], self.heads, -1), v.reshape(x.shape[0], self.heads, -1)

    def out(self, attended: Float[Array, "T N H"]) -> Float[Array, "T D"]:
        return self.out_proj(attended.reshape(attended.shape[0], -1))


class MLP(nnx.Module):
    """Two projections, and the norm of their sum with what they are given."""

    def __init__(self, width: int, units: int, *, dtype: Any, rngs: nnx.Rngs):
        self.fc1 = Linear(width, units, bias=True, dtype=dtype, rngs=rngs)
        self.fc2 = Linear(units, width, bias=True, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(width, eps=_EPS, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.norm(x + self.fc2(jax.nn.gelu(self.fc1(x), approximate=False)))


class EncoderLayer(nnx.Module):
    """Attention within each sequence, to both sides."""

    def __init__(self, config: BartConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.attention = Projections(config.hidden_size, config.encoder_heads, dtype=dtype, rngs=rngs)
        self.attention_norm = LayerNorm(config.hidden_size, eps=_EPS, dtype=dtype)
        self.mlp = MLP(config.hidden_size, config.encoder_units, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "E D"], together: Bool[Array, "E E"]) -> Float[Array, "E D"]:
        q, (k, v) = self.attention.queries(x), self.attention.keys_and_values(x)
        logits = jnp.einsum("tnh,snh->nts", q, k, precision=precision(q), preferred_element_type=jnp.float32)
        logits = jnp.where(together[None], logits * q.shape[-1] ** -0.5, -jnp.inf)
        shares = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
        attended = jnp.einsum("nts,snh->tnh", shares, v, precision=precision(v))
        return self.mlp(self.attention_norm(x + self.attention.out(attended)))


class DecoderLayer(nnx.Module):
    """Attention to the tokens before, then to all of the encoder's."""

    def __init__(self, config: BartConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.attention = Projections(config.hidden_size, config.decoder_heads, dtype=dtype, rngs=rngs)
        self.attention_norm = LayerNorm(config.hidden_size, eps=_EPS, dtype=dtype)
        self.cross = Projections(config.hidden_size, config.decoder_heads, dtype=dtype, rngs=rngs)
        self.cross_norm = LayerNorm(config.hidden_size, eps=_EPS, dtype=dtype)
        self.mlp = MLP(config.hidden_size, config.decoder_units, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"], layers: tuple[AttentionLayer, AttentionLayer], encoded, attend, pool):
        own, across = layers
        attended, pool = attend(self.attention.queries(x), *self.attention.keys_and_values(x), own, pool)
        x = self.attention_norm(x + self.attention.out(attended))
        keys = (None, None) if encoded is None else self.cross.keys_and_values(encoded)
        attended, pool = attend(self.cross.queries(x), *keys, across, pool)
        return self.mlp(self.cross_norm(x + self.cross.out(attended))), pool


class Positions(nnx.Module):
    """Learned positions added to embedded tokens, and a norm."""

    def __init__(self, config: BartConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.embedding = random_weights(rngs, (_FIRST_POSITION + config.context_len, config.hidden_size), dtype)
        self.norm = LayerNorm(config.hidden_size, eps=_EPS, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"], positions: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.norm(x + self.embedding[...][_FIRST_POSITION + positions])


class BartForConditionalGeneration(nnx.Module):
    """A BART, for one device.

    Its pool has two groups: the decoder's own keys, and the encoder's as each decoder layer sees them. `page_tables`
    and `out_cache_loc` of a batch are those of the first, `encoder_page_table` and `encoder_out_cache_loc` of the
    second.
    """

    def __init__(self, config: BartConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.embedding = random_weights(rngs, (config.vocab_size, config.hidden_size), dtype)
        self.logits_bias = nnx.Param(jnp.zeros((1, config.vocab_size), dtype))
        self.encoder_positions = Positions(config, dtype=dtype, rngs=rngs)
        self.decoder_positions = Positions(config, dtype=dtype, rngs=rngs)

        def stacked[Layer](layer_class: Callable[..., Layer], count: int) -> Layer:
            @nnx.split_rngs(splits=count)
            @nnx.vmap
            def make(rngs: nnx.Rngs) -> Layer:
                return layer_class(config, dtype=dtype, rngs=rngs)

            return make(rngs)

        self.encoder = stacked(EncoderLayer, config.encoder_layers)
        self.decoder = stacked(DecoderLayer, config.decoder_layers)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, dtype: Any) -> "BartForConditionalGeneration":
        """The model with a checkpoint's weights, held and computed in `dtype`.

        Raises:
            ValueError: The configuration or a tensor does not fit; the message names it.
            NotImplementedError: The model needs something that is not built.
        """
        config = BartConfig.from_dict(checkpoint.config)
        graph, state = nnx.split(nnx.eval_shape(lambda: cls(config, dtype=dtype, rngs=nnx.Rngs(0))))
        return nnx.merge(graph, weights.load(state, _sources(config), StoredTensors(checkpoint), unread=_UNREAD))

    @property
    def attention_layers(self) -> tuple[AttentionLayer, AttentionLayer]:
        """A decoder layer's own attention, and that across."""
        width, heads = self.config.hidden_size // self.config.decoder_heads, self.config.decoder_heads
        own = AttentionLayer(
            layer_id=0,
            tp_q_head_num=heads,
            tp_k_head_num=heads,
            tp_v_head_num=heads,
            head_dim=width,
            v_head_dim=width,
            scaling=width**-0.5,
        )
        return own, dataclasses.replace(own, group=1, is_cross_attention=True)

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, KVGroupSpec]:
        """The decoder's own keys, and the encoder's."""
        own, _ = self.attention_layers
        decoder = KVGroupSpec(
            name="decoder",
            num_layers=self.config.decoder_layers,
            num_kv_heads=own.tp_k_head_num,
            head_dim=own.head_dim,
        )
        return decoder, dataclasses.replace(decoder, name="encoder")

    def encode(self, input_ids: Int[Array, " E"], cu_lens: Int[Array, " B_plus_1"]) -> Float[Array, "E D"]:
        """The encoder's last hidden states.

        Args:
            input_ids: Tokens, sequence by sequence, then padding.
            cu_lens: Where each sequence's tokens begin; the last entry counts those that are no padding.
        """
        token = jnp.arange(input_ids.shape[0], dtype=jnp.int32)
        sequence = jnp.searchsorted(cu_lens, token, side="right").astype(jnp.int32)  # from 1 on
        hidden = self.encoder_positions(self._embedded(input_ids), token - cu_lens[sequence - 1])
        together = sequence[:, None] == sequence[None, :]
        graph, stack = nnx.split(self.encoder)
        return jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x, together), None), hidden, stack)[0]

    def __call__(
        self,
        forward_batch: ForwardBatch,
        metadata: Any,
        backend: AttentionBackend,
        pool: KVPool,
        encoded: Float[Array, "E D"] | None = None,
    ) -> tuple[Float[Array, "T D"], KVPool]:
        """The decoder's last hidden states, and the pool with this pass's keys and values.

        Args:
            encoded: What `encode` returned, to write at `encoder_out_cache_loc`; None if the pool has it.
        """

        def attend(q, k, v, layer, pool):
            return forward(backend, q, k, v, layer, forward_batch, metadata, pool)

        def body(carry, scanned):
            layer, index = scanned
            layers = dataclasses.replace(own, layer_id=index), dataclasses.replace(across, layer_id=index)
            return nnx.merge(graph, layer)(carry[0], layers, encoded, attend, carry[1]), None

        own, across = self.attention_layers
        hidden = self.decoder_positions(self._embedded(forward_batch.input_ids), forward_batch.positions)
        graph, stack = nnx.split(self.decoder)
        numbers = jnp.arange(self.config.decoder_layers, dtype=jnp.int32)
        return jax.lax.scan(body, (hidden, pool), (stack, numbers))[0]

    def compute_logits(self, hidden: Float[Array, "B D"]) -> Float32[Array, "B V"]:
        """float32 logits of the chosen hidden states."""
        kernel = self.embedding[...].T
        logits = jnp.matmul(hidden, kernel, precision=precision(hidden), preferred_element_type=jnp.float32)
        return logits + jnp.broadcast_to(self.logits_bias[...].astype(jnp.float32), logits.shape)

    def _embedded(self, input_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        rows = self.embedding[...][input_ids]
        return rows * jnp.asarray(self.config.embedding_scale, rows.dtype)


def _sources(config: BartConfig) -> dict[weights.Path, weights.Source]:
    """Where each leaf lies in a checkpoint."""
    sources: dict[weights.Path, weights.Source] = {
        ("embedding",): weights.Source({"model.shared.weight": None}),
        ("logits_bias",): weights.Source({"final_logits_bias": None}),
    }
    for stack, count, attentions in (
        ("encoder", config.encoder_layers, {"attention": "self_attn"}),
        ("decoder", config.decoder_layers, {"attention": "self_attn", "cross": "encoder_attn"}),
    ):
        prefix, numbers = f"model.{stack}.", {"layer": range(count)}
        places = (f"{stack}_positions",)
        sources[(*places, "embedding")] = weights.Source({f"{prefix}embed_positions.weight": None})
        sources |= _norm((*places, "norm"), f"{prefix}layernorm_embedding", {})
        prefix += "layers.{layer}."
        for ours, theirs in attentions.items():
            sources |= _norm((stack, f"{ours}_norm"), f"{prefix}{theirs}_layer_norm", numbers)
            for place, names in (("q", ("q",)), ("kv", ("k", "v")), ("out", ("out",))):
                projections = [f"{prefix}{theirs}.{name}_proj" for name in names]
                width = config.hidden_size if len(projections) > 1 else None
                sources |= _linear((stack, ours, f"{place}_proj"), dict.fromkeys(projections, width), numbers)
        for name in ("fc1", "fc2"):
            sources |= _linear((stack, "mlp", name), {prefix + name: None}, numbers)
        sources |= _norm((stack, "mlp", "norm"), f"{prefix}final_layer_norm", numbers)
    return sources


def _linear(path: weights.Path, parts: Mapping[str, int | None], numbers) -> dict[weights.Path, weights.Source]:
    return {
        (*path, leaf): weights.Source({f"{part}.{name}": width for part, width in parts.items()}, numbers=numbers)
        for leaf, name in (("kernel", "weight"), ("bias", "bias"))
    }


def _norm(path: weights.Path, prefix: str, numbers) -> dict[weights.Path, weights.Source]:
    return {
        (*path, leaf): weights.Source({f"{prefix}.{name}": None}, numbers=numbers)
        for leaf, name in (("scale", "weight"), ("bias", "bias"))
    }
