"""Attention: grouped-query attention of one layer, through the pass's backend."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jattn.backend import AttentionBackend, AttentionLayer, forward_rotary
from jattn.forward_batch import ForwardBatch
from jattn.parallel import Parallel
from jattn.rotary import Angles
from jattn_models.layers import Linear, RMSNorm


@dataclasses.dataclass(frozen=True)
class Pass:
    """What all layers of one forward pass share.

    Attributes:
        angles: Of the rotary embedding, for the batch's positions.
    """

    forward_batch: ForwardBatch
    metadata: Any
    backend: AttentionBackend
    angles: Angles


class Attention(nnx.Module):
    """Rotary grouped-query attention; queries, keys and values side by side in one kernel.

    Args:
        window_left: Keys to the left that a token sees, own one not counted; None for all.
        qkv_bias: Whether queries, keys and values have a bias.
        qk_norm_eps: Of a norm over each head's query and key before they turn; None for no norm.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window_left: int | None = None,
        qkv_bias: bool = False,
        qk_norm_eps: float | None = None,
        dtype: Any,
        rngs: nnx.Rngs,
        parallel: Parallel,
    ):
        self.parallel = parallel
        self.head_dim = head_dim
        self.window_left = window_left
        self.num_q_heads = parallel.share(num_q_heads, "`num_attention_heads`")
        self.num_kv_heads = parallel.share(num_kv_heads, "`num_key_value_heads`")
        heads = self.num_q_heads + 2 * self.num_kv_heads
        self.qkv_proj = Linear(hidden_size, heads * head_dim, bias=qkv_bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(self.num_q_heads * head_dim, hidden_size, dtype=dtype, rngs=rngs)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps, dtype=dtype)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps, dtype=dtype)

    def layer(self, layer_index: Int[Array, ""] | int) -> AttentionLayer:
        """What a backend must know of one of these layers."""
        return AttentionLayer(
            layer_id=layer_index,
            tp_q_head_num=self.num_q_heads,
            tp_k_head_num=self.num_kv_heads,
            tp_v_head_num=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scaling=self.head_dim**-0.5,
            sliding_window_size=-1 if self.window_left is None else self.window_left,
        )

    def __call__(self, x: Float[Array, "T D"], layer_index: Int[Array, ""], this_pass: Pass, pool: Any):
        """The layer's addition to the residual stream, and the pool as the backend returned it."""
        heads = self.qkv_proj(x).reshape(x.shape[0], -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = jnp.split(heads, (self.num_q_heads, self.num_q_heads + self.num_kv_heads), axis=1)
            heads = jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=1)
        out, pool = forward_rotary(
            this_pass.backend,
            heads,
            this_pass.angles,
            self.layer(layer_index),
            this_pass.forward_batch,
            this_pass.metadata,
            pool,
        )
        return self.parallel.all_reduce(self.o_proj(out.reshape(x.shape[0], -1))), pool
