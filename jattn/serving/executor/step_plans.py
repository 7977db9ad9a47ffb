"""Which steps an engine compiles, and which of them a launch takes."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jattn.compiled_steps import StepPlan
from jattn.serving.executor.batches import decode_batch, prefill_batch
from jattn.serving.executor.mesh_plans import on_mesh
from jattn.serving.executor.scores import score_batch
from jattn.serving.request import Request
from jattn.serving.resolved_config import ResolvedConfig
from jattn.serving.steps.choice import VARIANTS, Variant
from jattn.serving.steps.packing import Packing, on_packed, packed
from jattn.serving.steps.plain import Steps

_SCORED_AT_ONCE = 256  # places of prompts whose logits are held at the same time


class StepKey(NamedTuple):
    """A compiled step.

    Attributes:
        size: Rows of a decode or a choice of tokens, tokens of a prefill or a note, places of a score.
    """

    kind: Literal[
        "decode",
        "prefill",
        "note",
        "score",
        "forward_decode",
        "forward_prefill",
        "sample_decode",
        "sample_prefill",
    ]
    size: int
    variant: Variant


def step_key(
    kind: Literal["decode", "prefill"], size: int, requests: Iterable[Request], config: ResolvedConfig
) -> StepKey:
    """The cheapest step of a size that serves all of the requests."""
    return StepKey(kind, size, _served(_asked(requests), config))


def step_plans(
    steps: Steps, held: tuple[Any, Any, Any], config: ResolvedConfig, mixed_rows: int
) -> dict[Any, StepPlan]:
    """All steps of an engine, none compiled yet.

    Args:
        held: Weights, loop state and pool, or their shapes.
        mixed_rows: Rows that a prefill decodes at most.
    """
    unrolled = config.speculative is None  # a draft model's loop over tokens holds one over its layers
    plans = {}
    for key in step_keys(config):
        if key.kind == "decode":
            decode = functools.partial(steps.decode, variant=key.variant)
            arguments = (*held, decode_batch([], key.size, config))
            plans[key] = StepPlan(decode, arguments, donate=(1, 2), unrolled=unrolled)
        elif key.kind == "prefill":
            prefill = functools.partial(steps.prefill, variant=key.variant)
            sent = decode_batch([], mixed_rows, config), prefill_batch([], key.size, config, key.variant)
            plans[key] = taking_packed(prefill, held, sent, donate=(1, 2))
        elif key.kind == "note":
            note = functools.partial(steps.note, variant=key.variant)
            sent = (prefill_batch([], key.size, config, key.variant),)
            plans[key] = taking_packed(note, held[1:2], sent, donate=(0,))
    plans = on_mesh(plans, config.parallel)
    return plans | on_mesh(_score_plans(steps, plans, config), config.parallel)


def _score_plans(steps: Steps, plans: Mapping[StepKey, StepPlan], config: ResolvedConfig) -> dict[Any, StepPlan]:
    """The step that scores what a prefill leaves, if there is one."""
    prefill = plans.get(StepKey("prefill", config.prefill_buckets[0], "full"))
    if prefill is None:
        return {}
    key, left = score_key(config), jax.eval_shape(prefill.function, *prefill.arguments)[2].prompt_hidden
    arguments = (prefill.arguments[0], np.zeros(left.shape, left.dtype), score_batch([], key.size))
    return {key: StepPlan(steps.score, arguments)}


def step_keys(config: ResolvedConfig) -> list[StepKey]:
    """All steps of an engine, but for those of structured output."""
    keys = []
    for variant in VARIANTS if config.full_sampling else VARIANTS[:2]:
        if _served(variant, config) == variant:
            keys += [StepKey("decode", size, variant) for size in config.decode_buckets]
            keys += [StepKey("prefill", size, variant) for size in config.prefill_buckets]
    if config.enable_prefix_caching and (config.full_sampling or config.speculative):
        keys.append(note_key(config))
    if config.full_sampling:
        keys.append(score_key(config))
    return keys


def largest_steps(keys: Collection[StepKey]) -> set[StepKey]:
    """Those that serve any launch, in place of smaller ones."""
    most: dict[str, int] = {}
    for key in keys:
        most[key.kind] = max(key.size, most.get(key.kind, 0))
    return {key for key in keys if key.size == most[key.kind]}


def in_order_of_need(keys: Iterable[StepKey]) -> list[StepKey]:
    """Those that most launches would take first: small ones, and those without rules."""
    return sorted(keys, key=lambda key: (key.variant == "full", key.size))


def taking_packed(step: Callable[..., Any], held: tuple[Any, ...], sent: Any, *, donate: tuple[int, ...]) -> StepPlan:
    """The plan of a step whose last arguments, `sent` by the host, come as one (`packed`)."""
    return StepPlan(functools.partial(on_packed, step, Packing.of(sent)), (*held, packed(sent)), donate=donate)


def note_key(config: ResolvedConfig) -> StepKey:
    """The one step that puts tokens on record without computing them."""
    return StepKey("note", config.prefill_tokens, "full" if config.full_sampling else "plain")


def score_key(config: ResolvedConfig) -> StepKey:
    """The one step that gives log-probabilities of prompts."""
    return StepKey("score", min(_SCORED_AT_ONCE, config.prefill_tokens), "full")


def _asked(requests: Iterable[Request]) -> Variant:
    requests = list(requests)
    if any(request.needs_full_steps for request in requests):
        return "full"
    return "greedy" if all(request.params.temperature == 0 for request in requests) else "plain"


def _served(variant: Variant, config: ResolvedConfig) -> Variant:
    """The variant that serves another, so that it need not be compiled."""
    if config.batch_invariant:  # who is served beside a request must not choose its step
        return "full" if config.full_sampling else "plain"
    return "plain" if variant == "greedy" and not config.greedy_steps else variant
