"""Attention: grouped-query attention of one layer, through the pass's backend."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jattn.backend import AttentionBackend, AttentionLayer, forward, forward_rotary
from jattn.forward_batch import ForwardBatch
from jattn.parallel import Parallel
from jattn.rotary import Angles
from jattn_models.layer_pattern import RopeName
from jattn_models.layers import Linear, RMSNorm


@dataclasses.dataclass(frozen=True)
class Pass:
    """What all layers of one forward pass share.

    Attributes:
        angles: Of each rotary embedding, for the batch's positions.
    """

    forward_batch: ForwardBatch
    metadata: Any
    backend: AttentionBackend
    angles: Mapping[RopeName, Angles]


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Queries that grow with their position, so that attention stays peaked over long texts (arXiv:2501.19399).

    Attributes:
        scale: How much they grow with the logarithm of the position.
        floor: Tokens between one size and the next.
    """

    scale: float
    floor: float

    def __call__(self, positions: Int[Array, " T"]) -> Float32[Array, " T"]:
        """The factor on each token's query."""
        return 1.0 + self.scale * jnp.log1p(jnp.floor((positions.astype(jnp.float32) + 1.0) / self.floor))


class Attention(nnx.Module):
    """Grouped-query attention, rotary or not; queries, keys and values side by side in one kernel.

    Args:
        window_left: Keys to the left that a token sees, own one not counted; None for all.
        chunk_size: Tokens a chunk; a token sees the keys of its own one alone. None for no chunks.
        rope: Which of the model's rotary embeddings turns queries and keys; None for none.
        scaling: Factor on q.k; 1 / sqrt(head_dim) if None.
        temperature: Of queries; None for none.
        qkv_bias: Whether queries, keys and values have a bias.
        qk_norm: Makes a norm of a head's width, for each head's query and key before they turn; None for no norm.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window_left: int | None = None,
        chunk_size: int | None = None,
        rope: RopeName | None = "global",
        scaling: float | None = None,
        temperature: Temperature | None = None,
        qkv_bias: bool = False,
        qk_norm: Callable[[int], RMSNorm] | None = None,
        dtype: Any,
        rngs: nnx.Rngs,
        parallel: Parallel,
    ):
        self.parallel = parallel
        self.head_dim = head_dim
        self.window_left = window_left
        self.chunk_size = chunk_size
        self.rope: RopeName | None = rope
        self.scaling = head_dim**-0.5 if scaling is None else scaling
        self.temperature = temperature
        self.num_q_heads = parallel.share(num_q_heads, "`num_attention_heads`")
        self.num_kv_heads = parallel.share(num_kv_heads, "`num_key_value_heads`")
        heads = self.num_q_heads + 2 * self.num_kv_heads
        self.qkv_proj = Linear(hidden_size, heads * head_dim, bias=qkv_bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(self.num_q_heads * head_dim, hidden_size, dtype=dtype, rngs=rngs)
        self.q_norm = qk_norm(head_dim) if qk_norm else None
        self.k_norm = qk_norm(head_dim) if qk_norm else None

    def layer(self, layer_index: Int[Array, ""] | int) -> AttentionLayer:
        """What a backend must know of one of these layers."""
        return AttentionLayer(
            layer_id=layer_index,
            tp_q_head_num=self.num_q_heads,
            tp_k_head_num=self.num_kv_heads,
            tp_v_head_num=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scaling=self.scaling,
            sliding_window_size=-1 if self.window_left is None else self.window_left,
            chunk_size=self.chunk_size,
        )

    def __call__(self, x: Float[Array, "T D"], layer_index: Int[Array, ""], this_pass: Pass, pool: Any):
        """The layer's addition to the residual stream, and the pool as the backend returned it."""
        heads = self.qkv_proj(x).reshape(x.shape[0], -1, self.head_dim)
        q, k, v = jnp.split(heads, (self.num_q_heads, self.num_q_heads + self.num_kv_heads), axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.temperature is not None:
            factor = self.temperature(this_pass.forward_batch.positions)
            q = (q.astype(jnp.float32) * factor[:, None, None]).astype(q.dtype)
        layer, backend = self.layer(layer_index), this_pass.backend
        rest = (layer, this_pass.forward_batch, this_pass.metadata, pool)
        if self.rope is None:
            out, pool = forward(backend, q, k, v, *rest)
        else:
            qkv = jnp.concatenate([q, k, v], axis=1)
            out, pool = forward_rotary(backend, qkv, this_pass.angles[self.rope], *rest)
        return self.parallel.all_reduce(self.o_proj(out.reshape(x.shape[0], -1))), pool
