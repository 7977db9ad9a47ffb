"""AttentionBackend: what stands between a model and the kernels, and how a model and an engine call it."""

import dataclasses
import typing
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.arguments import array, instance
from jattn.attention.latent_heads import LatentHeads
from jattn.attention.layer import AttentionLayer
from jattn.forward_batch import ForwardBatch
from jattn.kv_pool import KVPool
from jattn.matmul import Splits, Unattended, UnattendedLatents, added, attended_at_once
from jattn.norm import HeadNorms, normed_heads
from jattn.rotary import Angles, rotate
from jattn_kernels import RawLatents, RawQueries

OfAllLayers = tuple[Float[Array, "L ..."], Int[Array, ""]]  # weights, and the number of the layer


@typing.runtime_checkable
class AttentionBackend(Protocol):
    """SGLang's attention backend made functional: metadata is returned, the pool is passed and returned.

    An implementation is static and hashable and holds no arrays. The metadata's type is its own affair.
    """

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> Any:
        """Metadata of a batch, once for all layers; jit-able."""
        ...

    def forward_extend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K Hv"] | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        metadata: Any,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "T N Hv"], KVPool]:
        """Writes this pass's keys and values, then attends; many tokens a sequence."""
        ...

    forward_decode = forward_extend  # one token a sequence


@typing.runtime_checkable
class SavesRotated(Protocol):
    """A backend that can turn queries and keys and save keys and values at once."""

    def save_rotated(
        self,
        qkv: Float[Array, "T heads H"] | Splits,
        angles: Angles,
        layer: AttentionLayer,
        metadata: Any,
        pool: KVPool,
        norms: HeadNorms | None = None,
    ) -> tuple[Float[Array, "T N H"], KVPool] | None:
        """Turned queries, and the pool with this pass's turned keys and values; None if it does not serve the layer.

        Args:
            norms: Of query and key heads before they turn.
        """
        ...


@typing.runtime_checkable
class AttendsLater(Protocol):
    """A backend that can leave attention to another kernel: to who reads it, or to one that turns heads too."""

    def unattended(
        self,
        qkv: Float[Array, "T heads H"] | Splits,
        angles: Angles,
        layer: AttentionLayer,
        metadata: Any,
        pool: KVPool,
        norms: HeadNorms | None = None,
    ) -> Unattended | None:
        """What `save_rotated` and attention would do; None if it is to be done."""
        ...


@typing.runtime_checkable
class SavesLatents(Protocol):
    """A backend that can norm and turn latent rows and save them at once."""

    def save_latents(
        self, latents: RawLatents, layer: AttentionLayer, metadata: Any, pool: KVPool
    ) -> tuple[Float[Array, "T 1 W"], KVPool] | None:
        """The rows, and the pool that has them; None if it does not serve the layer."""
        ...


@typing.runtime_checkable
class AttendsProjected(Protocol):
    """A backend that can absorb queries as it saves latent rows, and attend."""

    def attend_projected(
        self,
        queries: RawQueries,
        latents: RawLatents,
        layer: AttentionLayer,
        metadata: Any,
        pool: KVPool,
        v_up: OfAllLayers | None = None,
    ) -> tuple[Float[Array, "T N C"] | UnattendedLatents, KVPool] | None:
        """Means of rows for each head, and the pool with the rows; None if it does not do so here.

        Args:
            v_up: Each head's projection of values, if attention and this may be left to the kernel that reads them.
        """
        ...


@typing.runtime_checkable
class ExtendsLatent(Protocol):
    """A backend that can make keys and values of latent rows where that costs less than to attend to the rows."""

    def extend_latent(
        self,
        q_nope: Float[Array, "T N D"],
        q_pe: Float[Array, "T N R"],
        rows: Float[Array, "T 1 W"],
        heads: LatentHeads,
        layer: AttentionLayer,
        metadata: Any,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "T N V"], KVPool] | None:
        """Output of heads, and the pool with this pass's rows; None where attention is to be absorbed."""
        ...


def forward(backend: AttentionBackend, q, k, v, layer, forward_batch, metadata, pool, save_kv_cache=True):
    """Sends a layer's call to the method for the batch's phase; models call this one."""
    instance("forward_batch", forward_batch, ForwardBatch)
    is_decode = forward_batch.forward_mode.is_decode_or_idle()
    phase = backend.forward_decode if is_decode else backend.forward_extend
    return phase(q, k, v, layer, forward_batch, metadata, pool, save_kv_cache)


def forward_rotary(
    backend: AttentionBackend,
    qkv: Float[Array, "T heads H"] | Splits,
    angles: Angles,
    layer: AttentionLayer,
    forward_batch: ForwardBatch,
    metadata: Any,
    pool: Any,
    *,
    norms: HeadNorms | None = None,
    later: bool = False,
) -> tuple[Float[Array, "T N Hv"] | Unattended, Any]:
    """Turns queries and keys by their angles, then does as `forward`; models with rotary embedding call this one.

    Args:
        qkv: A token's query heads, then its key heads, then as many value heads.
        norms: Of query and key heads before they turn.
        later: Whether attention may be left to who reads it, and what is saved before it: the pool is then as it was.

    Raises:
        ValueError: `qkv` has not the layer's heads, or the angles have not its tokens; or the layer's rows are latent:
            those turn in part, which their model does.
    """
    instance("layer", layer, AttentionLayer)
    if layer.kv == "latent":
        raise ValueError(
            "`layer` must have keys and values of heads: latent rows turn in part, use `forward`. Got kv='latent'."
        )
    qkv = qkv if isinstance(qkv, Splits) else array("qkv", qkv, "tokens", "heads", "head_dim")
    heads = layer.tp_q_head_num + layer.tp_k_head_num + layer.tp_v_head_num
    if qkv.shape[1] != heads:
        raise ValueError(f"`qkv` must have the layer's {heads} query, key and value heads. Got qkv.shape={qkv.shape}.")
    shapes = [array("angles", part, "tokens", "pairs").shape for part in angles]
    if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0][0] != qkv.shape[0]:
        raise ValueError(
            f"`angles` must be two arrays [{qkv.shape[0]}, pairs], cosines and sines. Got shapes {shapes}."
        )
    if isinstance(backend, AttendsLater):
        unattended = backend.unattended(qkv, angles, layer, metadata, pool, norms)
        if unattended is not None and later and qkv.shape[0] == 1:
            return unattended, pool
        if unattended is not None and (result := attended_at_once(unattended)) is not None:
            rows, pages = result
            return rows.reshape(qkv.shape[0], layer.tp_q_head_num, -1), pool.with_pages(layer.group, *pages)
    saved = None
    if isinstance(backend, SavesRotated):
        saved = backend.save_rotated(qkv, angles, layer, metadata, pool, norms)
    if saved is not None:
        return forward(backend, saved[0], None, None, layer, forward_batch, metadata, saved[1], save_kv_cache=False)
    qkv = added(qkv)
    if norms is not None:
        qkv = normed_heads(qkv, norms, num_kv_heads=layer.tp_k_head_num)
    q, k, v = jnp.split(qkv, (layer.tp_q_head_num, layer.tp_q_head_num + layer.tp_k_head_num), axis=1)
    return forward(backend, rotate(q, *angles), rotate(k, *angles), v, layer, forward_batch, metadata, pool)


def forward_projected_latent(
    backend: AttentionBackend,
    queries: RawQueries,
    latents: RawLatents,
    heads: LatentHeads,
    layer: AttentionLayer,
    forward_batch: ForwardBatch,
    metadata: Any,
    pool: Any,
    *,
    v_up: OfAllLayers | None = None,
) -> tuple[Float[Array, "T N V"] | UnattendedLatents, Any]:
    """`forward_latent` of what projections give: a kernel may make all of it at once.

    Args:
        latents: Also has the angles that queries turn by.
        heads: Its keys' projection is that of the queries.
        v_up: The values' projection of all layers and the layer, if the output may be left to the kernel that reads it.

    Raises:
        ValueError: As `forward_latent`.
    """
    instance("layer", layer, AttentionLayer)
    if layer.kv == "latent" and isinstance(backend, AttendsProjected):
        later = {} if v_up is None else {"v_up": v_up}
        attended = backend.attend_projected(queries, latents, layer, metadata, pool, **later)
        if attended is not None:
            out, pool = attended
            return out if isinstance(out, UnattendedLatents) else heads.values(out), pool
    parts = queries.heads(latents.cos, latents.sin)
    return forward_latent(backend, *parts, latents, heads, layer, forward_batch, metadata, pool)


def forward_latent(
    backend: AttentionBackend,
    q_nope: Float[Array, "T N D"],
    q_pe: Float[Array, "T N R"],
    rows: Float[Array, "T 1 W"] | RawLatents,
    heads: LatentHeads,
    layer: AttentionLayer,
    forward_batch: ForwardBatch,
    metadata: Any,
    pool: Any,
) -> tuple[Float[Array, "T N V"], Any]:
    """Attention over latent rows, in the form that costs less; models of latent attention call this one.

    Args:
        q_nope: Of the queries the part that does not turn, not absorbed.
        q_pe: The part that does, turned.
        rows: Of this pass's tokens; or what they are made of, for a backend to make them as it saves them.

    Returns:
        The output of heads, and the pool with this pass's rows.

    Raises:
        ValueError: The layer's keys are no latent rows.
    """
    instance("layer", layer, AttentionLayer)
    if layer.kv != "latent":
        raise ValueError(f"`layer` must read latent rows. Got kv={layer.kv!r}.")
    is_new = True
    if isinstance(rows, RawLatents):
        saved = backend.save_latents(rows, layer, metadata, pool) if isinstance(backend, SavesLatents) else None
        rows, pool = (rows.made()[:, None], pool) if saved is None else saved
        is_new = saved is None
    if isinstance(backend, ExtendsLatent):
        extended = backend.extend_latent(q_nope, q_pe, rows, heads, layer, metadata, pool, is_new)
        if extended is not None:
            return extended
    q, values = jnp.concatenate([heads.absorbed(q_nope), q_pe], axis=-1), rows[..., : layer.v_head_dim]
    out, pool = forward(backend, q, rows, values, layer, forward_batch, metadata, pool, is_new)
    return heads.values(out), pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """What an engine says to the backend of its model's layers.

    Attributes:
        max_context_len: Longest request, in tokens.
        page_size: Tokens a page.
        max_num_seqs: Most sequences of a batch.
        dtype: Name of the dtype of queries, keys and values.
        kv_cache_dtype: What the pool stores; auto, a name of DTYPE_NAMES, or PACKED_LATENTS.
        implementation: Which kernels to use; None lets dispatch choose.
        speculative_num_draft_tokens: Tokens of a row that a step verifies; 1 is plain decode.
        batch_invariant: Whether results must not depend, to the bit, on the batch around a request.
    """

    max_context_len: int
    page_size: int
    max_num_seqs: int
    dtype: str
    kv_cache_dtype: str = "auto"
    implementation: str | None = None
    speculative_num_draft_tokens: int = 1
    batch_invariant: bool = False


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

    def mixes(self) -> bool:
        """Whether decodes may share a launch with prompts: whether a sequence's extend costs what it has to do."""
        ...
