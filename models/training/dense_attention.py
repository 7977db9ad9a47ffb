"""DenseCausalBackend: attention for training, over whole sequences of one length and without a cache or a pool."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.backend import AttentionLayer
from jattn.forward_batch import ForwardBatch, ForwardMode


@dataclasses.dataclass(frozen=True)
class DenseCausalBackend:
    """Causal attention over sequences of `seq_len` tokens each, differentiable."""

    seq_len: int

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing: every sequence has the same length."""

    def forward_extend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K Hv"],
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        metadata: None,
        pool: None,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "T N Hv"], None]:
        """Attends within each sequence."""
        q, k, v = (x.reshape(-1, self.seq_len, *x.shape[1:]) for x in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, scale=layer.scaling, is_causal=True)
        return out.reshape(-1, *out.shape[2:]), pool

    def forward_decode(self, *args, **kwargs):
        """Refused: there is no cache to decode from."""
        raise NotImplementedError("`DenseCausalBackend` keeps no cache; `FlashAttentionBackend` decodes.")


def dense_batch(tokens: Int[Array, "B S"]) -> ForwardBatch:
    """Whole sequences as one extend batch with nothing before them."""
    batch, seq_len = tokens.shape
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=tokens.reshape(-1),
        positions=jnp.tile(jnp.arange(seq_len, dtype=jnp.int32), batch),
        seq_lens=jnp.full(batch, seq_len, jnp.int32),
        cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * seq_len,
        out_cache_loc=(),
        page_tables=(),
    )
