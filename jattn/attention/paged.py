"""PagedAttentionBackend: the serving engine's own, which trusts the batches that the engine builds."""

import dataclasses
import functools
from operator import attrgetter
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.attention.backend import BackendOptions, OfAllLayers
from jattn.attention.latent_extend import LatentPages, extend_expanded
from jattn.attention.latent_form import choose_fewest_expanded, expanded_spec
from jattn.attention.latent_heads import LatentHeads
from jattn.attention.latent_plan import LatentPlan, latent_plan
from jattn.attention.layer import AttentionLayer
from jattn.attention.metadata import AttentionMetadata, QueriesOverPages
from jattn.attention.paged_call import PagedCall, attend_pages
from jattn.attention.specs import LayerKind, kind_of
from jattn.forward_batch import ForwardBatch
from jattn.kv_cache_dtype import is_fp8, stored_dtype
from jattn.kv_pool import KVPool
from jattn.matmul import Splits, Unattended, UnattendedLatents, added
from jattn.norm import HeadNorms, normed_heads
from jattn.rotary import Angles, rotate
from jattn_kernels import RawLatents, RawQueries
from jattn_kernels.dispatch import is_served, works_per_sequence
from jattn_kernels.packed_latents import is_packed
from jattn_kernels.spec import PageLayout


@dataclasses.dataclass(frozen=True)
class PagedAttentionBackend:
    """Static and hashable. Batches say their pages, and come as the engine makes them: nothing is checked twice.

    Attributes:
        kinds: Of the model's layers: each has a schedule.
        options: What the engine says.
        fewest_expanded: New tokens from which on latent rows are made keys and values; reckoned if None.
    """

    kinds: tuple[LayerKind, ...]
    options: BackendOptions
    fewest_expanded: int | None = None

    @classmethod
    def for_model(cls, layers: tuple[AttentionLayer, ...], options: BackendOptions) -> "PagedAttentionBackend":
        """The backend of a model's layers, one given of each kind."""
        kind = functools.partial(kind_of, batch_invariant=options.batch_invariant)
        return cls(tuple(dict.fromkeys(map(kind, layers))), options)

    max_context_len = property(attrgetter("options.max_context_len"), doc="Longest sequence, in tokens.")
    page_size = property(attrgetter("options.page_size"), doc="Tokens a page.")

    @functools.cached_property
    def _stored_dtype(self) -> Any:
        latents = all(kind.latent for kind in self.kinds)
        return stored_dtype(self.options.kv_cache_dtype, self.options.dtype, latents=latents)

    @property
    def _is_fp8(self) -> bool:
        return is_fp8(self.options.kv_cache_dtype)

    def mixes(self) -> bool:
        """Whether each sequence's extend costs what its own length asks for and no more, in every kind of layer."""
        calls = map(self._call, self.kinds)
        return all(works_per_sequence(call.extend, **call.facts) for call in calls)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> AttentionMetadata:
        """Metadata of a batch, once for all layers; jit-able. This is where a batch is decode or extend."""
        mode, lens, q_len = forward_batch.forward_mode, forward_batch.seq_lens, None
        if mode.is_target_verify():
            q_len = self.options.speculative_num_draft_tokens
            lens = jnp.where(lens > 0, lens + q_len, 0)
        elif mode.is_decode_or_idle():
            q_len = 1
            lens = jnp.zeros_like(lens) if mode.is_idle() else lens
        metadata = AttentionMetadata(
            page_tables=forward_batch.page_tables,
            seq_lens=lens,
            cu_q_lens=forward_batch.cu_q_lens if q_len is None else None,
            q_len=q_len,
            slots=forward_batch.out_cache_loc,
            encoder_page_table=forward_batch.encoder_page_table,
            encoder_lens=forward_batch.encoder_lens,
        )
        return self.with_schedules(metadata, is_mixed=mode.is_mixed())

    def with_schedules[M: AttentionMetadata](self, metadata: M, *, is_mixed: bool) -> M:
        """Metadata with the schedules of the backend's kinds of layer.

        Args:
            is_mixed: Whether some of the sequences decode beside prompts.
        """
        schedules = tuple(self._schedule(kind, metadata, is_mixed) for kind in self.kinds)
        return dataclasses.replace(metadata, kinds=self.kinds, schedules=schedules)

    def forward_extend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "S K H"] | None,
        v: Float[Array, "S K Hv"] | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        metadata: AttentionMetadata,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "T N Hv"], KVPool]:
        """Writes this pass's keys and values, if there are any, then attends. The pool may be donated."""
        scales = (layer.k_scale, layer.v_scale) if self._is_fp8 else (None, None)
        if save_kv_cache and k is not None:
            slots = forward_batch.encoder_out_cache_loc if layer.is_cross_attention else metadata.slots[layer.group]
            assert slots is not None
            pool = pool.written(layer, slots, k, v, *scales)
        return self._attended(q, layer, metadata, pool), pool

    def _attended(
        self,
        q: Float[Array, "T N H"] | tuple[Float[Array, "T N C"], Float[Array, "T N R"]],
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        pool: KVPool,
    ) -> Float[Array, "T N Hv"]:
        """Attention over what the pool has.

        Args:
            q: As of `attend_pages`.
        """
        group, kind = pool.groups[layer.group], self._kind(layer)
        schedule = metadata.schedule_of(kind)
        return attend_pages(
            q,
            group.k,
            group.v,
            metadata.read_by(kind, layer.group),
            spec=self._kind(layer, group.page_layout).spec,
            latent=kind.latent,
            layer_index=layer.layer_id,
            k_scale=layer.k_scale if self._is_fp8 else None,
            v_scale=layer.v_scale if self._is_fp8 else None,
            sinks=layer.sinks,
            schedule=None if isinstance(schedule, LatentPlan) else schedule,
            implementation=self.options.implementation,
        )

    forward_decode = forward_extend

    def extend_latent(
        self,
        q_nope: Float[Array, "T N D"],
        q_pe: Float[Array, "T N R"],
        rows: Float[Array, "T 1 W"],
        heads: LatentHeads,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        pool: KVPool,
        save_kv_cache: bool = True,
    ) -> tuple[Float[Array, "T N V"], KVPool] | None:
        """Output of heads, and the pool with this pass's rows; None where attention is to be absorbed."""
        kind, slots = self._kind(layer), metadata.slots[layer.group]
        plan = metadata.schedule_of(kind)
        if not isinstance(plan, LatentPlan):
            return None
        assert kind.head_widths is not None
        scale = layer.k_scale if self._is_fp8 else None
        if save_kv_cache:
            pool = pool.written(layer, slots, rows, None, scale)
        pages, page_table = pool.groups[layer.group].k, metadata.page_tables[layer.group]
        facts: dict[str, Any] = {"layer_index": layer.layer_id, "value_dim": layer.v_head_dim, "scale": scale}
        latents = LatentPages(pages=pages, page_table=page_table, **facts)
        own = rows[:, 0]
        if pages.dtype != own.dtype:  # a token is to be seen alike by those of its launch and by later ones
            own = latents.rows(slots, own.dtype)
        out = extend_expanded(
            q_nope,
            q_pe,
            own,
            heads,
            latents,
            plan,
            spec=expanded_spec(kind.spec, kind.head_widths),
            absorbed_spec=kind.spec,
            implementation=self.options.implementation,
        )
        return out, pool

    def save_rotated(
        self,
        qkv: Float[Array, "T heads H"] | Splits,
        angles: Angles,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        pool: KVPool,
        norms: HeadNorms | None = None,
    ) -> tuple[Float[Array, "T N H"], KVPool]:
        """Turned queries, and the pool with this pass's turned keys and values. The pool may be donated."""
        slots = metadata.slots[layer.group]
        if self._is_fp8 and not (layer.k_scale is None and layer.v_scale is None):
            qkv = added(qkv)
            if norms is not None:
                qkv = normed_heads(qkv, norms, num_kv_heads=layer.tp_k_head_num)
            q, k, v = jnp.split(qkv, (layer.tp_q_head_num, layer.tp_q_head_num + layer.tp_k_head_num), axis=1)
            pool = pool.written(layer, slots, rotate(k, *angles), v, layer.k_scale, layer.v_scale)
            return rotate(q, *angles), pool
        options = {"norms": norms, "implementation": self.options.implementation}
        return pool.rotate_and_write(layer.group, layer.layer_id, slots, qkv, angles, **options)

    def unattended(
        self,
        qkv: Float[Array, "T heads H"] | Splits,
        angles: Angles,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        pool: KVPool,
        norms: HeadNorms | None = None,
    ) -> Unattended | None:
        """The attention that is meant, of tokens that decode; None if it is to be computed."""
        group, kind = pool.groups[layer.group], self._kind(layer)
        read = metadata.read_by(kind, layer.group)
        plain = read.q_positions is None and read.custom_mask is None and layer.sinks is None
        scaled = self._is_fp8 and not (layer.k_scale is None and layer.v_scale is None)
        if read.q_len != 1 or kind.latent or kind.is_cross or group.v is None or scaled or not plain:
            return None
        cos, sin = angles
        return Unattended(
            qkv=qkv,
            cos=cos,
            sin=sin,
            slots=metadata.slots[layer.group],
            norms=norms,
            k_pages=group.k,
            v_pages=group.v,
            page_table=read.page_table,
            seq_lens=read.seq_lens,
            layer_index=layer.layer_id,
            schedule=metadata.schedule_of(kind),
            spec=self._kind(layer, group.page_layout).spec,
            implementation=self.options.implementation,
        )

    def save_latents(
        self, latents: RawLatents, layer: AttentionLayer, metadata: AttentionMetadata, pool: KVPool
    ) -> tuple[Float[Array, "T 1 W"], KVPool] | None:
        """The rows that are made, and the pool with them; None where nothing does both. The pool may be donated."""
        options, slots = {"implementation": self.options.implementation}, metadata.slots[layer.group]
        stored = self._stored_dtype
        facts: dict[str, Any] = {"dtype": latents.dtype, "kv_dtype": stored, "page_size": self.page_size, **options}
        if stored != latents.dtype and not is_packed(stored):
            return None
        if not is_served("mla_write", spec=self._kind(layer).spec, **facts):
            return None
        rows, pool = pool.latents_written(layer.group, layer.layer_id, slots, latents, **options)
        return rows[:, None], pool

    def attend_projected(
        self,
        queries: RawQueries,
        latents: RawLatents,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        pool: KVPool,
        v_up: OfAllLayers | None = None,
    ) -> tuple[Float[Array, "T N C"] | UnattendedLatents, KVPool] | None:
        """Means of latent rows, and the pool with this pass's; None where attention is expanded, or no kernel absorbs.

        The pool may be donated. Of one token that decodes, what is read as its values where `v_up` is given.
        """
        options: dict[str, Any] = {"implementation": self.options.implementation}
        slots, kind = metadata.slots[layer.group], self._kind(layer)
        facts: dict[str, Any] = {"dtype": latents.dtype, "kv_dtype": self._stored_dtype, "page_size": self.page_size}
        facts |= {"num_tokens": slots.shape[0], "absorbed": queries.nope_dim}
        if isinstance(metadata.schedule_of(kind), LatentPlan):
            return None
        if not is_served("mla_write", spec=kind.spec, **facts, **options):
            return None
        q, pool = pool.absorbed_and_written(layer.group, layer.layer_id, slots, queries, latents, **options)
        if v_up is not None and (rows := self._unattended_latents(q, v_up, layer, metadata, pool)) is not None:
            return rows, pool
        return self._attended(q, layer, metadata, pool), pool

    def _unattended_latents(
        self,
        q: tuple[Float[Array, "T N C"], Float[Array, "T N R"]],
        v_up: OfAllLayers,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        pool: KVPool,
    ) -> UnattendedLatents | None:
        """The attention that is meant, of one token that decodes; None if it is to be computed."""
        kind, pages = self._kind(layer), pool.groups[layer.group].k
        read = metadata.read_by(kind, layer.group)
        plain = read.q_positions is None and read.custom_mask is None and read.q_start is None
        if read.q_len != 1 or read.seq_lens.shape[0] != 1 or not plain or pages.dtype != q[0].dtype:
            return None
        return UnattendedLatents(
            q_nope=q[0],
            q_pe=q[1],
            latent_pages=pages,
            page_table=read.page_table,
            seq_lens=read.seq_lens,
            layer_index=layer.layer_id,
            v_up=v_up[0],
            v_up_layer=v_up[1],
            schedule=metadata.schedule_of(kind),
            spec=kind.spec,
            implementation=self.options.implementation,
        )

    def _schedule(self, kind: LayerKind, metadata: AttentionMetadata, is_mixed: bool) -> Any:
        if kind.is_cross and metadata.encoder_lens is None:
            return None
        call, read, num_tokens = self._call(kind), metadata.read_by(kind, 0), metadata.slots[0].shape[0]
        fewest = self._fewest_expanded(kind, read)
        if fewest is None or num_tokens < fewest:
            return call.schedule(read, num_tokens)
        assert kind.head_widths is not None
        return latent_plan(call, kind.head_widths, read, num_tokens, fewest=fewest, is_mixed=is_mixed)

    def _fewest_expanded(self, kind: LayerKind, read: QueriesOverPages) -> int | None:
        """New tokens from which on a launch makes keys and values of latent rows; None if it never does."""
        if kind.head_widths is None or read.q_len is not None:
            return None
        if read.custom_mask is not None or read.q_positions is not None:  # of prefix and own tokens in one
            return None
        facts = {"dtype": self.options.dtype, "implementation": self.options.implementation}
        if not is_served("ragged_extend", spec=expanded_spec(kind.spec, kind.head_widths), page_size=None, **facts):
            return None
        if self.fewest_expanded is not None:
            return self.fewest_expanded
        return choose_fewest_expanded(kind.spec, kind.head_widths)

    def _kind(self, layer: AttentionLayer, page_layout: PageLayout = "NHD") -> LayerKind:
        return kind_of(layer, page_layout, batch_invariant=self.options.batch_invariant)

    def _call(self, kind: LayerKind) -> PagedCall:
        of_pool = ("k_scale", "v_scale") if self._is_fp8 else ()
        return PagedCall(
            spec=kind.spec,
            dtype=self.options.dtype,
            kv_dtype=self._stored_dtype,
            page_size=self.page_size,
            latent=kind.latent,
            features=("layer_index", *of_pool, *(("sinks",) if kind.has_sinks else ())),
            implementation=self.options.implementation,
        )
