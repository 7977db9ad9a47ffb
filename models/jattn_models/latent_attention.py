"""LatentAttention: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), through the pass's backend.

A token's keys and values of all heads are made from one compressed row, which is all that the pool holds. Whether they
are made before attention, or queries take up the keys' projection and outputs the values' so that attention reads the
rows themselves, is the backend's choice.
"""

import dataclasses
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from jattn.backend import AttentionLayer, HeadWidths, LatentHeads, RawLatents, RawQueries, forward_projected_latent
from jattn.kv_pool import KVGroupSpec
from jattn.matmul import NextProduct, Splits, UnattendedLatents, added
from jattn.norm import Unnormed
from jattn.parallel import Parallel
from jattn_models.decoder_config import DecoderConfig
from jattn_models.layer_pattern import LayerKind
from jattn_models.layers import Linear, ReadInPlace, random_weights
from jattn_models.next_product import next_product
from jattn_models.norms import RMSNorm

_EPS = 1e-6  # of the norms of compressed rows, whatever the model's


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig(DecoderConfig):
    """A decoder's facts with latent attention; `head_dim` is that of what turns, `rope_dim`.

    Attributes:
        q_rank: Numbers of a compressed query; None if queries are not compressed.
        kv_rank: Numbers of a compressed key and value.
        nope_dim: Numbers of a query or key head that do not turn.
        value_dim: Numbers of a value head.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    value_dim: int

    @property
    def rope_dim(self) -> int:
        """Numbers of a query head, and of the key that all heads share, that turn."""
        return self.head_dim


class LatentAttention(nnx.Module):
    """Latent attention of one layer.

    Args:
        config: The model's facts.
        kind: The layer's.
        parallel: Its share of the heads is this device's; each device has all of the compressed rows.
    """

    def __init__(self, config: LatentConfig, kind: LayerKind, *, dtype: Any, rngs: nnx.Rngs, parallel: Parallel):
        del kind
        self.num_heads = heads = parallel.share(config.num_q_heads, "`num_attention_heads`")
        self.kv_rank, self.rope_dim = config.kv_rank, config.rope_dim
        scale = (config.nope_dim + config.rope_dim) ** -0.5 * config.rope.logit_factor
        self.scaling = scale if config.attention_scale is None else config.attention_scale
        width, outputs = config.hidden_size, heads * (config.nope_dim + config.rope_dim)
        self.latents_begin = config.q_rank or outputs  # what queries are, or are made of, stands before
        inputs = self.latents_begin + config.kv_rank + config.rope_dim
        self.in_proj = Linear(width, inputs, dtype=dtype, rngs=rngs)
        self.q_a_norm = None if config.q_rank is None else RMSNorm(config.q_rank, eps=_EPS, dtype=dtype)
        self.q_proj = None if config.q_rank is None else Linear(config.q_rank, outputs, dtype=dtype, rngs=rngs)
        self.kv_a_norm = RMSNorm(config.kv_rank, eps=_EPS, dtype=dtype)
        self.k_up, self.v_up = (
            ReadInPlace(random_weights(rngs, (heads, size, config.kv_rank), dtype)[...])
            for size in (config.nope_dim, config.value_dim)
        )
        self.nope_dim, self.value_dim = config.nope_dim, config.value_dim
        self.o_proj = Linear(heads * config.value_dim, width, dtype=dtype, rngs=rngs)

    def layer(self, layer_index: Int[Array, ""] | int) -> AttentionLayer:
        """What a backend must know of one of these layers."""
        return AttentionLayer(
            layer_id=layer_index,
            tp_q_head_num=self.num_heads,
            tp_k_head_num=1,
            tp_v_head_num=1,
            head_dim=self.kv_rank + self.rope_dim,
            v_head_dim=self.kv_rank,
            scaling=self.scaling,
            kv="latent",
            head_widths=HeadWidths(nope=self.nope_dim, value=self.value_dim),
        )

    def kv_group(self, num_layers: int) -> KVGroupSpec:
        """The pool that so many of these layers need."""
        return KVGroupSpec(
            name="latents",
            num_layers=num_layers,
            num_kv_heads=1,
            head_dim=self.kv_rank + self.rope_dim,
            v_head_dim=self.kv_rank,
            latent=True,
        )

    def __call__(
        self,
        x: Float[Array, "T D"] | Unnormed | Splits,
        layer_index: Int[Array, ""],
        this_pass: Any,
        pool: Any,
        *,
        later: bool = False,
    ):
        """The layer's addition to the residual stream, and the pool as the backend returned it.

        Args:
            x: Rows; or their product with the first projection.
            later: Whether what it adds may be left to the kernel that reads it.
        """
        angles = this_pass.angles["global"]
        product = x if isinstance(x, Splits) else self.in_proj.splits(x)
        first = product
        if self.q_a_norm is not None and self.q_proj is not None:
            first = self.q_proj.splits(self.q_a_norm(added(product)[:, : self.latents_begin]))
        k_up, layer = self.k_up.stack_and_layer
        queries = RawQueries(rows=first, k_up=k_up, layer_index=layer, rope_dim=self.rope_dim)
        assert self.kv_a_norm.scale is not None
        scale, number = self.kv_a_norm.scale.stack_and_layer
        facts = {"scale": scale, "layer_index": number, "eps": _EPS, "begin": self.latents_begin}
        rows = RawLatents(rows=product, cos=angles[0], sin=angles[1], **facts)
        heads = LatentHeads(self.k_up.of_layer, self.v_up.of_layer)
        rest = (self.layer(layer_index), this_pass.forward_batch, this_pass.metadata, pool)
        v_up, number = self.v_up.stack_and_layer
        of_all = None
        if later and number is not None and self.o_proj.plain_weights is not None:
            of_all = v_up, number
        out, pool = forward_projected_latent(this_pass.backend, queries, rows, heads, *rest, v_up=of_all)
        return self.o_proj.later(out if isinstance(out, UnattendedLatents) else out.reshape(x.shape[0], -1)), pool

    @property
    def first_projection(self) -> Linear:
        """What it begins with."""
        return self.in_proj

    def first_product(self, norm: RMSNorm) -> NextProduct | None:
        """The product with the first projection of what `norm` gives."""
        return next_product(norm, self.in_proj)
