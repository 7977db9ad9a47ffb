"""The steps of launches in which a request has a grammar: forward pass and choice of tokens apart."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import numpy as np

from jattn.compiled_steps import StepPlan
from jattn.serving.executor.batches import decode_batch, prefill_batch
from jattn.serving.executor.masks import empty_masks
from jattn.serving.executor.mesh_plans import on_mesh
from jattn.serving.executor.step_plans import StepKey, taking_packed
from jattn.serving.resolved_config import ResolvedConfig
from jattn.serving.steps.choice import Variant
from jattn.serving.steps.plain import Steps, Unsampled


def forward_key(kind: Literal["decode", "prefill"], size: int, config: ResolvedConfig) -> StepKey:
    """The forward pass of a launch."""
    return StepKey("forward_decode" if kind == "decode" else "forward_prefill", size, structured_variant(config))


def sample_key(forward: StepKey, config: ResolvedConfig) -> StepKey:
    """The choice of tokens behind a forward pass."""
    if forward.kind == "forward_prefill":
        return StepKey("sample_prefill", config.max_num_seqs, forward.variant)
    return StepKey("sample_decode", forward.size, forward.variant)


def structured_variant(config: ResolvedConfig) -> Variant:
    """The one variant that they come in, which serves all."""
    return "full" if config.full_sampling else "plain"


def structured_plans(
    steps: Steps, held: tuple[Any, Any, Any], config: ResolvedConfig, mixed_rows: int, vocab_size: int
) -> dict[Any, StepPlan]:
    """All of them, none compiled yet.

    Args:
        held: Weights, loop state and pool, or their shapes.
        mixed_rows: Rows that a prefill decodes at most.
    """
    weights, state, _ = held
    variant, plans = structured_variant(config), {}
    unrolled = config.speculative is None  # as in `step_plans`
    decode, prefill = (
        functools.partial(step, variant=variant) for step in (steps.forward_decode, steps.forward_prefill)
    )
    sample = functools.partial(steps.sample, variant=variant)
    for size in config.decode_buckets:
        key, arguments = forward_key("decode", size, config), (*held, decode_batch([], size, config))
        plans[key] = StepPlan(decode, arguments, donate=(1, 2), unrolled=unrolled)
    for size in config.prefill_buckets:
        sent = decode_batch([], mixed_rows, config), prefill_batch([], size, config, variant)
        plans[forward_key("prefill", size, config)] = taking_packed(prefill, held, sent, donate=(1, 2))
    forwards, plans = on_mesh(plans, config.parallel), {}
    smallest = forwards[forward_key("decode", config.decode_buckets[0], config)]
    left = jax.eval_shape(smallest.function, *smallest.arguments)[2]
    for forward in forwards:
        key = sample_key(forward, config)
        of_decode = key.kind == "sample_decode"
        unsampled = _resized(left if of_decode else dataclasses.replace(left, drafts=None), key.size)
        plans[key] = StepPlan(sample, (weights, state, unsampled, empty_masks(key.size, vocab_size)), donate=(1,))
    return forwards | on_mesh(plans, config.parallel)


def _resized(left: Unsampled, num_rows: int) -> Unsampled:
    """Zeros of what a forward pass leaves, for another number of rows."""
    places = num_rows * (1 if left.drafts is None else left.drafts.shape[1] + 1)
    hidden = np.zeros((places, *left.hidden.shape[1:]), left.hidden.dtype)
    of_rows = dataclasses.replace(left, hidden=None)  # pyright: ignore[reportArgumentType]
    resized = jax.tree.map(lambda leaf: np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype), of_rows)
    return dataclasses.replace(resized, hidden=hidden)
