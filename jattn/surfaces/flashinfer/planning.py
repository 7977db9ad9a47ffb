"""What pymllm's backend plans of a batch: a plan for each of its wrappers and each group of the pool."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn.arguments import instance
from jattn.attention.metadata import AttentionMetadata
from jattn.forward_batch import ForwardBatch
from jattn.spec_info import EagleVerifyInput, tree_of
from jattn.surfaces.flashinfer.config import FlashInferConfig
from jattn.surfaces.flashinfer.metadata import DecodeMetadata, PrefillMetadata
from jattn.surfaces.flashinfer.plan import PagedPlan, RaggedPlan
from jattn.surfaces.places import places_of


def plan_batch(
    config: FlashInferConfig, batch: ForwardBatch, use_ragged: bool | None = None, extend_no_prefix: bool | None = None
) -> DecodeMetadata | PrefillMetadata:
    """Metadata of a batch, which was checked; see `FlashInferAttnBackend.init_forward_metadata`."""
    mode, num_tokens = batch.forward_mode, batch.input_ids.shape[0]
    num_drafted = num_tokens // batch.batch_size if mode.is_target_verify() else 0
    read = _places(config, batch, num_drafted)
    if mode.is_decode_or_idle():
        return DecodeMetadata(_plans(config, read, num_tokens))
    config.check_prefill()
    if mode.is_target_verify():
        read, use_ragged = _with_drafts(read, batch, num_drafted), False
    else:
        read = dataclasses.replace(read, cu_q_lens=batch.cu_q_lens, q_len=None)
    if use_ragged is None:
        use_ragged = not mode.is_draft_extend() and config.kv_cache_dtype == config.q_dtype
    if not use_ragged:
        return PrefillMetadata(_plans(config, read, num_tokens), use_ragged=False, extend_no_prefix=False)
    prefix_lens = batch.extend_prefix_lens
    known = None if isinstance(prefix_lens, Tracer) else np.asarray(prefix_lens)
    if extend_no_prefix is None:
        extend_no_prefix = known is not None and not known.any()
    if extend_no_prefix and known is not None and known.any():
        raise ValueError(
            f"`extend_no_prefix` needs sequences without keys from before. Got prefixes of {known.tolist()} tokens."
        )
    ragged = RaggedPlan(
        cu_q_lens=batch.cu_q_lens,
        cu_kv_lens=batch.cu_q_lens,
        spec=config.spec,
        num_tokens=num_tokens,
        q_dtype=config.q_dtype.name,
        kv_dtype=config.q_dtype.name,
        implementation=config.implementation,
    )
    plans = _plans(config, dataclasses.replace(read, seq_lens=prefix_lens), num_tokens, after_keys=True)
    return PrefillMetadata(plans, use_ragged=True, extend_no_prefix=extend_no_prefix, ragged=ragged)


def _with_drafts(read: AttentionMetadata, batch: ForwardBatch, num_drafted: int) -> AttentionMetadata:
    """What drafted tokens read, as many a row, in a chain or a tree; padded rows stay padding."""
    instance("spec_info", batch.spec_info, EagleVerifyInput, type(None))
    lens, tree = batch.seq_lens, (None, None)
    if isinstance(batch.spec_info, EagleVerifyInput):
        tree = tree_of(batch.spec_info, lens, num_drafted)
    return dataclasses.replace(
        read,
        seq_lens=jnp.where(lens > 0, lens + num_drafted, 0),
        cu_q_lens=jnp.arange(batch.batch_size + 1, dtype=jnp.int32) * num_drafted,
        q_len=None,
        custom_mask=tree[0],
        q_positions=tree[1],
    )


def _places(config: FlashInferConfig, batch: ForwardBatch, num_drafted: int) -> AttentionMetadata:
    """What a decode of the batch reads; of encoders only if the backend has any.

    Raises:
        ValueError: The batch does not say where its keys are.
    """
    if not config.is_encoder_decoder:
        batch = dataclasses.replace(batch, encoder_lens=None, encoder_page_table=None)
    elif batch.page_tables and (batch.encoder_page_table is None or batch.encoder_lens is None):
        raise ValueError("`encoder_page_table` and `encoder_lens` must be given beside `page_tables`. Got None.")
    elif batch.encoder_lens is None:
        raise ValueError("`encoder_lens` must be given with `is_encoder_decoder`. Got None.")
    places = places_of(batch, config.max_context_len, config.page_size, num_drafted)
    return AttentionMetadata(
        page_tables=places.page_tables,
        seq_lens=batch.seq_lens,
        cu_q_lens=None,
        q_len=1,
        slots=(),
        encoder_page_table=places.encoder_page_table,
        encoder_lens=batch.encoder_lens,
    )


def _plans(
    config: FlashInferConfig, read: AttentionMetadata, num_tokens: int, *, after_keys: bool = False
) -> tuple[PagedPlan, ...]:
    """The plan of each wrapper for each group of the pool.

    Args:
        after_keys: All of a decoder's own keys that are read come before its queries.
    """
    plans = []
    for group, kind in itertools.product(range(len(read.page_tables)), config.kinds(causal=not after_keys)):
        own = vars(read.read_by(kind, group))
        if after_keys and not kind.is_cross:
            own["q_start"] = read.seq_lens
        plan = PagedPlan(
            spec=kind.spec,
            page_size=config.page_size,
            num_tokens=num_tokens,
            q_dtype=config.q_dtype.name,
            kv_dtype=config.kv_cache_dtype.name,
            implementation=config.implementation,
            **own,
        )
        plans.append(plan.scheduled())
    return tuple(plans)
