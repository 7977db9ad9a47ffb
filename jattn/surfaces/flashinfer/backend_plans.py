"""The plans of pymllm's backend: one for each of its wrappers and each group of the pool."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jattn.arguments import instance
from jattn.spec_info import EagleVerifyInput, tree_of
from jattn.surfaces.flashinfer.config import FlashInferConfig
from jattn.surfaces.flashinfer.metadata import PrefillMetadata, WrapperDispatch
from jattn.surfaces.flashinfer.places import Places
from jattn.surfaces.flashinfer.plan import PagedPlan


def verify_metadata(
    config: FlashInferConfig, places: Places, seq_lens: Int[Array, " B"], num_tokens: int, spec_info: Any
) -> PrefillMetadata:
    """Metadata of drafted tokens, as many a row, in a chain or a tree; padded rows stay padding."""
    bs = seq_lens.shape[0]
    instance("spec_info", spec_info, EagleVerifyInput, type(None))
    drafted = num_tokens // bs
    mask, positions = (None, None) if spec_info is None else tree_of(spec_info, seq_lens, drafted)
    plans = wrapper_plans(
        config,
        places,
        jnp.where(seq_lens > 0, seq_lens + drafted, 0),
        jnp.arange(bs + 1, dtype=jnp.int32) * drafted,
        num_tokens,
        q_positions=positions,
        custom_mask=mask,
    )
    return PrefillMetadata(plans, use_ragged=False, extend_no_prefix=False)


def wrapper_plans(
    config: FlashInferConfig,
    places: Places,
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"] | None = None,
    num_tokens: int | None = None,
    *,
    causal: bool = True,
    q_start: Int[Array, " B"] | None = None,
    q_positions: Int[Array, " T"] | None = None,
    custom_mask: Bool[Array, " M"] | None = None,
) -> tuple[PagedPlan, ...]:
    """The plans of every wrapper, for each group of the pool."""

    def plan(table, lens, *, window: int | None = None, causal: bool = causal, **own: Any) -> PagedPlan:
        return PagedPlan(
            page_table=table,
            seq_lens=lens,
            cu_q_lens=cu_q_lens,
            q_len=1 if cu_q_lens is None else None,
            spec=config.spec(causal=causal, window_left=window),
            page_size=config.page_size,
            num_tokens=lens.shape[0] if num_tokens is None else num_tokens,
            q_dtype=config.q_dtype.name,
            kv_dtype=config.kv_cache_dtype.name,
            implementation=config.implementation,
            **own,
        ).scheduled()

    own: dict[str, Any] = {"q_start": q_start, "q_positions": q_positions, "custom_mask": custom_mask}
    plans = []
    for table in places.tables:
        if config.dispatch_reason is WrapperDispatch.SLIDING_WINDOW:
            plans.append(plan(table, seq_lens, window=config.sliding_window_size, **own))
        plans.append(plan(table, seq_lens, **own))
        if config.dispatch_reason is WrapperDispatch.CROSS_ATTENTION:
            plans.append(plan(places.encoder_table, places.encoder_lens, causal=False))
    return tuple(plans)
