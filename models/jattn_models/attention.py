"""Attention: grouped-query attention of one layer, through the pass's backend."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jattn.backend import AttentionBackend, AttentionLayer, forward, forward_rotary
from jattn.forward_batch import ForwardBatch
from jattn.kv_pool import KVGroupSpec
from jattn.matmul import NextProduct, QuantizedRows, Splits, Unattended, Unmultiplied
from jattn.norm import HeadNorms, NormedRows, Unnormed, normed_heads, taken
from jattn.page_lists import ALL_KEYS, AttentionSpan
from jattn.parallel import ONE_DEVICE, Parallel
from jattn.rotary import Angles
from jattn_models.decoder_config import DecoderConfig
from jattn_models.layer_pattern import LayerKind, RopeName
from jattn_models.layers import Linear, ReadInPlace
from jattn_models.next_product import next_product
from jattn_models.norms import ProjectionNorm, RMSNorm


@dataclasses.dataclass(frozen=True)
class Pass:
    """What all layers of one forward pass share.

    Attributes:
        angles: Of each rotary embedding, for the batch's positions.
        parallel: The devices that share the model, as they exchange in this pass.
    """

    forward_batch: ForwardBatch
    metadata: Any
    backend: AttentionBackend
    angles: Mapping[RopeName, Angles]
    parallel: Parallel = ONE_DEVICE


class Attention(nnx.Module):
    """Grouped-query attention, rotary or not; queries, keys and values side by side in one kernel.

    Args:
        config: The model's facts.
        kind: The layer's.
        parallel: Its share of the heads is this device's; of fewer key heads than devices, each has the one that its
            queries see.
    """

    def __init__(self, config: DecoderConfig, kind: LayerKind, *, dtype: Any, rngs: nnx.Rngs, parallel: Parallel):
        self.head_dim = config.head_dim
        self.window_left = kind.window_left
        self.chunk_size = kind.chunk_size
        self.group = config.spans.index(kind.span)
        self.rope: RopeName | None = kind.rope
        self.scaling = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.cap = 0.0 if config.attention_cap is None else config.attention_cap
        grows = config.temperature is not None and (kind.rope is None or config.temperature.of_turning)
        self.temperature = config.temperature if grows else None
        self.num_q_heads = parallel.share(config.num_q_heads, "`num_attention_heads`")
        self.num_kv_heads = parallel.share_of_keys(config.num_kv_heads, "`num_key_value_heads`")
        width, outputs = config.hidden_size, (self.num_q_heads + 2 * self.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(width, outputs, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        inputs = self.num_q_heads * config.head_dim
        self.o_proj = Linear(inputs, width, bias=config.o_bias, summed_over=parallel, dtype=dtype, rngs=rngs)
        self.sinks = ReadInPlace(jnp.zeros(self.num_q_heads, jnp.float32)) if config.sinks else None
        self.alone_in_group = sum(each.span == kind.span for _, each in config.stacks) == 1
        self.qkv_clip = config.qkv_clip
        self.norms_heads = config.qk_norm in ("head", "unit")
        self.q_norm, self.k_norm = (
            _norm(config, kind, heads, dtype) for heads in (self.num_q_heads, self.num_kv_heads)
        )

    def layer(self, layer_index: Int[Array, ""] | int) -> AttentionLayer:
        """What a backend must know of one of these layers; of sinks the shape alone."""
        sinks: Any = None if self.sinks is None else jax.ShapeDtypeStruct((self.num_q_heads,), jnp.float32)
        return AttentionLayer(
            layer_id=layer_index,
            tp_q_head_num=self.num_q_heads,
            tp_k_head_num=self.num_kv_heads,
            tp_v_head_num=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scaling=self.scaling,
            logit_cap=self.cap,
            sliding_window_size=-1 if self.window_left is None else self.window_left,
            group=self.group,
            sinks=sinks,
            chunk_size=self.chunk_size,
        )

    def kv_group(self, num_layers: int) -> KVGroupSpec:
        """The pool that so many of these layers need."""
        span = AttentionSpan(self.window_left, self.chunk_size)
        return KVGroupSpec(
            name="layers" if span == ALL_KEYS else "window layers",
            num_layers=num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            span=span,
        )

    def __call__(
        self,
        x: NormedRows | Unnormed | Splits,
        layer_index: Int[Array, ""],
        this_pass: Pass,
        pool: Any,
        *,
        later: bool = False,
    ):
        """This device's part of what the layer adds to the residual stream, and the pool as the backend returned it.

        Args:
            x: Rows; or their product with the first projection, if there is a `first_product`.
            later: Whether what it adds may be left to the kernel that reads it.
        """
        norms, layer, backend = self._head_norms(), self.layer(layer_index), this_pass.backend
        if self.sinks is not None:
            # Stacks of all layers are read in place: a layer's by themselves would be copied out of them.
            sinks = self.sinks.stack_and_layer[0] if self.alone_in_group else self.sinks.of_layer
            layer = dataclasses.replace(layer, sinks=sinks)
        rest = (layer, this_pass.forward_batch, this_pass.metadata, pool)
        if self.rope is not None and self._turns_alone:
            product = x if isinstance(x, Splits) else self.qkv_proj.splits(x)
            heads = product.reshape(x.shape[0], -1, self.head_dim)
            later = later and self.o_proj.plain_weights is not None
            out, pool = forward_rotary(backend, heads, this_pass.angles[self.rope], *rest, norms=norms, later=later)
            return self._output(out), pool
        assert not isinstance(x, Splits)
        rows = x if isinstance(x, QuantizedRows) else taken(x)
        heads = self.qkv_proj(rows).reshape(x.shape[0], -1, self.head_dim)
        if norms is not None:
            heads = normed_heads(heads, norms, num_kv_heads=self.num_kv_heads)
        q, k, v = jnp.split(heads, (self.num_q_heads, self.num_q_heads + self.num_kv_heads), axis=1)
        if isinstance(self.q_norm, ProjectionNorm) and isinstance(self.k_norm, ProjectionNorm):
            q, k = ProjectionNorm.of_all((self.q_norm, q), (self.k_norm, k), parallel=this_pass.parallel)
        if self.qkv_clip is not None:
            q, k, v = (jnp.clip(part, -self.qkv_clip, self.qkv_clip) for part in (q, k, v))
        if self.temperature is not None:
            factor = self.temperature(this_pass.forward_batch.positions)
            q = (q.astype(jnp.float32) * factor[:, None, None]).astype(q.dtype)
        if self.rope is None:
            out, pool = forward(backend, q, k, v, *rest)
        else:
            qkv = jnp.concatenate([q, k, v], axis=1)
            out, pool = forward_rotary(backend, qkv, this_pass.angles[self.rope], *rest)
        return self._output(out), pool

    def first_product(self, norm: RMSNorm) -> NextProduct | None:
        """The product with the first projection of what `norm` gives, where nothing but turning comes after it."""
        return next_product(norm, self.qkv_proj) if self.rope is not None and self._turns_alone else None

    @property
    def first_projection(self) -> Linear:
        """What it begins with."""
        return self.qkv_proj

    @property
    def rounds_rows(self) -> bool:
        """Whether it takes rows that are rounded to fp8, which it would do itself."""
        return self.qkv_proj.rounds_rows

    def adds_up(self, x: Unnormed) -> bool:
        """Whether its first projection's kernel adds such rows up."""
        return self.rope is not None and self._turns_alone and self.qkv_proj.adds_up(x)

    @property
    def _turns_alone(self) -> bool:
        """Whether nothing but norms of each head stands between the projection and the turning."""
        return self.qkv_clip is None and self.temperature is None and not isinstance(self.q_norm, ProjectionNorm)

    def _output(self, out: Float[Array, "T N H"] | Unattended) -> Float[Array, "T D"] | Splits | Unmultiplied:
        return self.o_proj.later(out if isinstance(out, Unattended) else out.reshape(out.shape[0], -1))

    def _head_norms(self) -> HeadNorms | None:
        """The norms of each head by itself."""
        if self.q_norm is None or self.k_norm is None or not self.norms_heads:
            return None
        scales: dict[str, Any] = {}
        if self.q_norm.scale is not None and self.k_norm.scale is not None:
            (q_scale, layer), (k_scale, _) = (each.stack_and_layer for each in (self.q_norm.scale, self.k_norm.scale))
            scales = {"q_scale": q_scale, "k_scale": k_scale, "layer_index": layer}
        return HeadNorms(eps=self.q_norm.eps, offset=self.q_norm.offset, **scales)


def _norm(config: DecoderConfig, kind: LayerKind, heads: int, dtype: Any) -> RMSNorm | None:
    """Of queries or keys, before they turn; `heads` are this device's."""
    match config.qk_norm:
        case "head":
            return RMSNorm(config.head_dim, eps=config.rms_norm_eps, offset=config.norm_offset, dtype=dtype)
        case "unit" if kind.rope:
            return RMSNorm(config.head_dim, eps=config.rms_norm_eps, scaled=False, dtype=dtype)
        case "projection":
            return ProjectionNorm(heads * config.head_dim, eps=config.rms_norm_eps, dtype=dtype)
    return None
