"""Llama 3.x: a decoder of equal layers, stacked and scanned."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jattn.backend import AttentionBackend, AttentionLayer
from jattn.checkpoint import Checkpoint
from jattn.forward_batch import ForwardBatch
from jattn.kv_pool import KVGroupSpec, KVPool
from jattn.parallel import ONE_DEVICE, Parallel
from jattn_models import weights
from jattn_models.attention import Attention, Pass
from jattn_models.layers import GatedMLP, RMSNorm, Vocabulary
from jattn_models.llama_config import LlamaConfig


class LlamaLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs, parallel: Parallel):
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(
            config.hidden_size,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            rngs=rngs,
            parallel=parallel,
        )
        self.post_attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs, parallel=parallel)

    def __call__(self, hidden: Float[Array, "T D"], layer_index: Int[Array, ""], this_pass: Pass, pool: Any):
        attended, pool = self.attention(self.input_norm(hidden), layer_index, this_pass, pool)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_norm(hidden)), pool


class LlamaForCausalLM(nnx.Module):
    """A Llama 3.x language model; a `jattn.model.CausalLM`.

    Args:
        config: The model's facts.
        dtype: Of the weights and of the computation; norms, angles and logits are float32.
        rngs: For random weights.
        parallel: This device's share of the model.
    """

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs, parallel: Parallel = ONE_DEVICE):
        self.config = config
        self.parallel = parallel
        self.vocabulary = Vocabulary(
            config.vocab_size, config.hidden_size, tied=config.tied, dtype=dtype, rngs=rngs, parallel=parallel
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> LlamaLayer:
            return LlamaLayer(config, dtype=dtype, rngs=rngs, parallel=parallel)

        self.layers = stacked(rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, *, dtype: Any, parallel: Parallel = ONE_DEVICE
    ) -> "LlamaForCausalLM":
        """The model with a checkpoint's weights, held and computed in `dtype`.

        Raises:
            ValueError: The configuration or a tensor does not fit; the message names it.
            NotImplementedError: The model needs something that is not built, or `parallel` more than one device.
        """
        if parallel.size != 1:
            raise NotImplementedError(
                "`from_checkpoint` loads a whole model, for one device; the constructor makes a share of one. "
                f"Got {parallel}."
            )
        config = LlamaConfig.from_dict(checkpoint.config)
        abstract = nnx.eval_shape(lambda: cls(config, dtype=dtype, rngs=nnx.Rngs(0), parallel=parallel))
        graph, state = nnx.split(abstract)
        unused = ("lm_head.weight",) if config.tied else ()
        return nnx.merge(graph, weights.load(state, _sources(config), checkpoint, unused=unused))

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_len(self) -> int:
        """Positions that the model was made for, in tokens."""
        return self.config.context_len

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """One kind of layer."""
        return (self.layers.attention.layer(0),)

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """One group: all layers are alike."""
        heads = self.parallel.share(self.config.num_kv_heads, "`num_key_value_heads`")
        return (
            KVGroupSpec(
                name="layers", num_layers=self.config.num_layers, num_kv_heads=heads, head_dim=self.config.head_dim
            ),
        )

    def __call__[Pool: KVPool | None](
        self, forward_batch: ForwardBatch, metadata: Any, backend: AttentionBackend, pool: Pool
    ) -> tuple[Float[Array, "T D"], Pool]:
        """The last hidden states, after the final norm, and the pool with this pass's keys and values.

        Args:
            pool: Whatever the backend takes for one; None passes through.
        """
        graph, stacked = nnx.split(self.layers)
        this_pass = Pass(forward_batch, metadata, backend, self.config.rope.angles(forward_batch.positions))

        def body(carry, scanned):
            hidden, pool = carry
            layer_state, layer_index = scanned
            return nnx.merge(graph, layer_state)(hidden, layer_index, this_pass, pool), None

        hidden = self.vocabulary.embed(forward_batch.input_ids)
        layer_indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (hidden, pool), _ = jax.lax.scan(body, (hidden, pool), (stacked, layer_indices))
        return self.norm(hidden), pool

    def compute_logits(self, hidden: Float[Array, "B D"]) -> Float32[Array, "B V"]:
        """float32 logits of the chosen hidden states."""
        return self.vocabulary.logits(hidden)


def _sources(config: LlamaConfig) -> dict[weights.Path, weights.Sources]:
    """Where each leaf of the model comes from."""
    layer = "model.layers.{layer}."
    q, kv = (heads * config.head_dim for heads in (config.num_q_heads, config.num_kv_heads))
    sources: dict[weights.Path, weights.Sources] = {
        ("vocabulary", "embedding"): {"model.embed_tokens.weight": None},
        ("layers", "input_norm", "scale"): {layer + "input_layernorm.weight": None},
        ("layers", "attention", "qkv_proj", "kernel"): {
            layer + "self_attn.q_proj.weight": q,
            layer + "self_attn.k_proj.weight": kv,
            layer + "self_attn.v_proj.weight": kv,
        },
        ("layers", "attention", "o_proj", "kernel"): {layer + "self_attn.o_proj.weight": None},
        ("layers", "post_attention_norm", "scale"): {layer + "post_attention_layernorm.weight": None},
        ("layers", "mlp", "gate_up_proj", "kernel"): {
            layer + "mlp.gate_proj.weight": config.intermediate_size,
            layer + "mlp.up_proj.weight": config.intermediate_size,
        },
        ("layers", "mlp", "down_proj", "kernel"): {layer + "mlp.down_proj.weight": None},
        ("norm", "scale"): {"model.norm.weight": None},
    }
    if not config.tied:
        sources[("vocabulary", "lm_head", "kernel")] = {"lm_head.weight": None}
    return sources
