"""How many pages an engine has that was told no number: as many as its weights and its steps leave memory for."""

import dataclasses
import functools
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.compiled_steps import CompiledSteps, StepPlan
from jattn.device_mesh import bytes_on_one, memory_stats
from jattn.lowering import LoweringProcesses
from jattn.serving.executor.pool_memory import fitting_pool
from jattn.serving.executor.served_model import ServedModel
from jattn.serving.executor.state import made_state
from jattn.serving.executor.step_plans import largest_steps, step_plans
from jattn.serving.resolved_config import ResolvedConfig, bytes_of_pool, default_pages
from jattn.step_compilation import compile_steps

_REST = 0.03  # of the memory: for fragments, for results that are under way, and for what libraries take
_TOO_FEW, _TOO_MANY = 0.02, 0.01  # of the memory, by which the pool may be smaller or larger than fits exactly
_FEWEST_PAGES = 2
_LOGITS_ALIVE = 8  # copies of a launch's logits, in float32, that a step may hold at once
_WIDEST_ALIVE = 2  # results of a layer's widest product


def beside_steps(
    served: ServedModel, config: ResolvedConfig, vocab_size: int, processes: LoweringProcesses
) -> tuple[ResolvedConfig, CompiledSteps]:
    """The same configuration with the pages that fit beside the weights, which are on the device, and all steps.

    The largest steps are compiled for a pool beside an estimate of what they need, and what they do need says whether
    it stands. Compiled for another pool they need the same.

    If all that the requests can use is an eighth of the free memory or less, they have it, and nothing is compiled.

    Returns:
        With the steps that were compiled for this pool, if any.

    Raises:
        ValueError: No two pages fit.
    """
    stats, none = memory_stats(), CompiledSteps({})
    if "bytes_limit" not in stats:
        return config, none
    limit, free = stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"]
    pool_bytes = functools.partial(bytes_of_pool, served.kv_groups, config)
    if config.num_pages > config.max_num_seqs * config.max_pages and pool_bytes(config.num_pages) <= free // 8:
        return config, none
    state = made_state(config, vocab_size)
    held = sum(bytes_on_one(leaf) for leaf in jax.tree.leaves(state)) + _largest_product(served.weights)
    held += int(_REST * limit)

    def fitting(temporaries: int) -> ResolvedConfig:
        beside = held + temporaries
        return dataclasses.replace(config, num_pages=default_pages(config, served.kv_groups, beside=beside))

    most_temporaries = free - held - pool_bytes(_FEWEST_PAGES)
    tried = fitting(min(_estimate(served, config, vocab_size), most_temporaries))
    arrays = served.weights, state, fitting_pool(served.kv_groups, tried)
    plans = step_plans(served.steps, arrays, tried, served.mixed_rows)
    largest: dict[Hashable, StepPlan] = {key: plans[key].without_arrays() for key in largest_steps(plans)}
    del state, arrays, plans  # XLA tries products in their memory
    steps = compile_steps(largest, progress=config.progress, processes=processes)
    exact = fitting(steps.temporary_bytes)
    if -_TOO_MANY * limit <= pool_bytes(exact.num_pages) - pool_bytes(tried.num_pages) <= _TOO_FEW * limit:
        return tried, steps
    return exact, none


def _estimate(served: ServedModel, config: ResolvedConfig, vocab_size: int) -> int:
    """Bytes that the steps that need most may need beside their arguments."""
    widths = [leaf.shape[-1] for leaf in jax.tree.leaves(served.weights) if leaf.ndim >= 2]
    widest = max((width for width in widths if width != vocab_size), default=0)
    of_layer = _WIDEST_ALIVE * config.prefill_tokens * widest * jnp.dtype(config.dtype).itemsize
    logits = config.max_num_seqs * (1 + config.num_draft_tokens) * vocab_size * jnp.dtype(jnp.float32).itemsize
    return of_layer + _LOGITS_ALIVE * logits


def _largest_product(weights: Any) -> int:
    """Bytes of the largest matrix among the weights, and a quarter for what it is multiplied with, and the result.

    XLA makes a copy of each product's operands to try how it is computed fastest, for steps that are compiled in the
    background too.
    """
    matrices = (leaf for leaf in jax.tree.leaves(weights) if leaf.ndim >= 2)
    # All leading axes are those of layers and experts.
    sizes = (bytes_on_one(leaf) // math.prod(leaf.sharding.shard_shape(leaf.shape)[:-2]) for leaf in matrices)
    return max(sizes, default=0) * 5 // 4
