"""AttentionBackend: the surface between a model and the kernels, and the names of its implementations."""

import dataclasses
import functools
import importlib
import typing
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.arguments import array, check_whole, instance, number
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import KVPool
from jattn.rotary import Angles, rotate


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """What a backend must know about the layer that calls it: the functional RadixAttention of SGLang.

    Attributes:
        layer_id: Index within the layer's pool group; may be traced, so that one compiled body serves a scan.
        tp_q_head_num, tp_k_head_num, tp_v_head_num: Heads on this device.
        head_dim, v_head_dim: Widths of a key and a value head.
        scaling: Factor on q.k.
        logit_cap: Soft cap; 0 is off.
        sliding_window_size: Keys to the left, own one not counted; -1 is off.
        group: Which group of the pool holds this layer's keys.
        use_irope: Keys of the own chunk only, where the backend has an `attention_chunk_size`.
        is_cross_attention: Queries see the encoder's keys, all of them.
        k_scale, v_scale: What keys and values in fp8 are stored divided by, for all heads or for each; None is 1.
        chunk_size: Tokens a chunk; a token sees the keys of its own one alone. None is off. The kernel keeps to it;
            `use_irope` makes virtual batches.

    Raises:
        ValueError: A static field contradicts its rule, or the heads do not divide.
    """

    layer_id: Int[Array, ""] | int
    tp_q_head_num: int = dataclasses.field(metadata={"static": True})
    tp_k_head_num: int = dataclasses.field(metadata={"static": True})
    tp_v_head_num: int = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})
    v_head_dim: int = dataclasses.field(metadata={"static": True})
    scaling: float = dataclasses.field(metadata={"static": True})
    logit_cap: float = dataclasses.field(default=0.0, metadata={"static": True})
    sliding_window_size: int = dataclasses.field(default=-1, metadata={"static": True})
    group: int = dataclasses.field(default=0, metadata={"static": True})
    use_irope: bool = dataclasses.field(default=False, metadata={"static": True})
    is_cross_attention: bool = dataclasses.field(default=False, metadata={"static": True})
    k_scale: Float[Array, "..."] | None = None
    v_scale: Float[Array, "..."] | None = None
    chunk_size: int | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self):
        check_whole(self, "tp_q_head_num", "tp_k_head_num", "tp_v_head_num", "head_dim", "v_head_dim")
        check_whole(self, "sliding_window_size", least=-1)
        check_whole(self, "group", least=0)
        check_whole(self, "chunk_size", optional=True)
        if self.tp_q_head_num % self.tp_k_head_num:
            raise ValueError(
                "`tp_q_head_num` must be a multiple of `tp_k_head_num`. "
                f"Got tp_q_head_num={self.tp_q_head_num}, tp_k_head_num={self.tp_k_head_num}."
            )
        for name in ("scaling", "logit_cap"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        if self.logit_cap < 0:
            raise ValueError(f"`logit_cap` must be at least 0 (off). Got logit_cap={self.logit_cap}.")


# What the kernels' names are called in a call of a backend.
WORDS = {
    "k_pages": "pool",
    "v_pages": "pool",
    "slots": "out_cache_loc",
    "layer_index": "layer.layer_id",
    "num_q_heads": "layer.tp_q_head_num",
    "num_kv_heads": "layer.tp_k_head_num",
    "head_dim": "layer.head_dim",
    "v_head_dim": "layer.v_head_dim",
    "sm_scale": "layer.scaling",
    "logits_soft_cap": "layer.logit_cap",
    "window_left": "layer.sliding_window_size",
    "k_scale": "layer.k_scale",
    "v_scale": "layer.v_scale",
    "kv_scale": "layer.k_scale",
    "cache_k": "k",
    "cache_v": "v",
    "loc": "out_cache_loc",
}


def checked_rows(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, pool: Any) -> tuple[Any, Any, Any]:
    """What a layer's call hands over, `q`, `k` and `v` as JAX's arrays; the last two may be None.

    Raises:
        ValueError: An argument is of another type or shape than the layer says.
    """
    instance("layer", layer, AttentionLayer)
    instance("forward_batch", forward_batch, ForwardBatch)
    instance("pool", pool, KVPool)
    if layer.group >= len(pool.groups):
        raise ValueError(f"`layer.group` must be one of the {len(pool.groups)} groups of `pool`. Got {layer.group}.")
    q = array("q", q, "tokens", "heads", "head_dim")
    if q.shape[1:] != (layer.tp_q_head_num, layer.head_dim):
        raise ValueError(
            f"`q` must be [tokens, {layer.tp_q_head_num}, {layer.head_dim}], the layer's heads. Got q.shape={q.shape}."
        )
    k, v = (x if x is None else array(name, x, "tokens", "heads", "head_dim") for name, x in (("k", k), ("v", v)))
    return q, k, v


@typing.runtime_checkable
class AttentionBackend(Protocol):
    """SGLang's attention backend made functional: metadata is returned, the pool is passed and returned.

    An implementation is static and hashable and holds no arrays. The metadata's type is its own affair.
    """

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> typing.Any:
        """Metadata of a batch, once for all layers; jit-able."""
        ...

    def forward_extend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K Hv"] | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        metadata: typing.Any,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "T N Hv"], KVPool]:
        """Writes this pass's keys and values, then attends; many tokens a sequence."""
        ...

    def forward_decode(
        self,
        q: Float[Array, "B N H"],
        k: Float[Array, "B K H"] | None,
        v: Float[Array, "B K Hv"] | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        metadata: typing.Any,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "B N Hv"], KVPool]:
        """Writes this pass's keys and values, then attends; one token a sequence."""
        ...


def forward(backend: AttentionBackend, q, k, v, layer, forward_batch, metadata, pool, save_kv_cache=True):
    """Sends a layer's call to the phase that the batch is in; models call this one."""
    instance("forward_batch", forward_batch, ForwardBatch)
    mode: ForwardMode = forward_batch.forward_mode
    phase = backend.forward_decode if mode.is_decode_or_idle() else backend.forward_extend
    return phase(q, k, v, layer, forward_batch, metadata, pool, save_kv_cache)


@typing.runtime_checkable
class SavesRotated(Protocol):
    """A backend that turns queries and keys and saves keys and values at once."""

    def save_rotated(
        self, qkv: Float[Array, "T heads H"], angles: Angles, layer: AttentionLayer, metadata: typing.Any, pool: KVPool
    ) -> tuple[Float[Array, "T N H"], KVPool]:
        """Turned queries, and the pool with this pass's turned keys and values."""
        ...


def forward_rotary(
    backend: AttentionBackend,
    qkv: Float[Array, "T heads H"],
    angles: Angles,
    layer: AttentionLayer,
    forward_batch: ForwardBatch,
    metadata: typing.Any,
    pool: typing.Any,
) -> tuple[Float[Array, "T N Hv"], typing.Any]:
    """Turns queries and keys by their angles, then does as `forward`; models with rotary embedding call this one.

    Args:
        qkv: A token's query heads, then its key heads, then as many value heads.

    Raises:
        ValueError: `qkv` has not the layer's heads, or the angles have not its tokens.
    """
    instance("layer", layer, AttentionLayer)
    qkv = array("qkv", qkv, "tokens", "heads", "head_dim")
    heads = layer.tp_q_head_num + layer.tp_k_head_num + layer.tp_v_head_num
    if qkv.shape[1] != heads:
        raise ValueError(f"`qkv` must have the layer's {heads} query, key and value heads. Got qkv.shape={qkv.shape}.")
    shapes = [array("angles", part, "tokens", "pairs").shape for part in angles]
    if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0][0] != qkv.shape[0]:
        raise ValueError(
            f"`angles` must be two arrays [{qkv.shape[0]}, pairs], cosines and sines. Got shapes {shapes}."
        )
    if isinstance(backend, SavesRotated):
        q, pool = backend.save_rotated(qkv, angles, layer, metadata, pool)
        return forward(backend, q, None, None, layer, forward_batch, metadata, pool, save_kv_cache=False)
    q, k, v = jnp.split(qkv, (layer.tp_q_head_num, layer.tp_q_head_num + layer.tp_k_head_num), axis=1)
    return forward(backend, rotate(q, *angles), rotate(k, *angles), v, layer, forward_batch, metadata, pool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """What an engine says to the backend of its model's layers.

    Attributes:
        max_context_len: Longest request, in tokens.
        page_size: Tokens a page.
        max_num_seqs: Most sequences of a batch.
        dtype: Name of the dtype of queries, keys and values.
        kv_cache_dtype: What the pool stores; auto, or a name of DTYPE_NAMES.
        implementation: Which kernels to use; None lets dispatch choose.
        speculative_num_draft_tokens: Tokens of a row that a step verifies; 1 is plain decode.
    """

    max_context_len: int
    page_size: int
    max_num_seqs: int
    dtype: str
    kv_cache_dtype: str = "auto"
    implementation: str | None = None
    speculative_num_draft_tokens: int = 1


@typing.runtime_checkable
class EngineBackend(AttentionBackend, Protocol):
    """A backend that an engine can make for its model."""

    @classmethod
    def for_model(cls, layers: tuple[AttentionLayer, ...], options: BackendOptions) -> "EngineBackend":
        """The backend of a model's layers, one given of each kind.

        Raises:
            ValueError: A value contradicts its rule.
            NotImplementedError: The backend does not serve such layers.
        """
        ...


BACKENDS = {
    "flash_attention": "jattn.flash_attention:FlashAttentionBackend",
    "flashinfer": "jattn.flashinfer:FlashInferAttnBackend",
}


def backend_class(backend: str) -> type[EngineBackend]:
    """The backend that goes by the name `backend`.

    Raises:
        ValueError: No backend has that name; the message lists those there are.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(sorted(BACKENDS))}. Got {backend!r}.")
    module, attribute = BACKENDS[backend].split(":")
    return getattr(importlib.import_module(module), attribute)
