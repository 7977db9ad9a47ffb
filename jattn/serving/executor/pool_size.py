"""How many pages an engine has that was told no number: as many as its weights and its steps leave memory for."""

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import jax

from jattn.compiled_steps import StepPlan, compile_steps
from jattn.device_mesh import bytes_on_one, memory_stats
from jattn.model import CausalLM
from jattn.serving.executor.pool_memory import fitting_pool
from jattn.serving.executor.served_model import served_model
from jattn.serving.executor.state import made_state
from jattn.serving.executor.step_plans import StepKey, largest_steps, step_plans
from jattn.serving.resolved_config import ResolvedConfig, default_pages
from jattn.serving.steps.plain import VARIANTS

_TRIED_PAGES = 64  # of the pool that steps are compiled for to see what they need; more changes nothing of that
_REST = 0.03  # of the memory: for fragments, for results that are under way, and for what libraries take


def beside_steps(model: CausalLM, config: ResolvedConfig, *, draft_model: CausalLM | None = None) -> ResolvedConfig:
    """The same configuration with the pages that fit beside the weights, which are on the device, and all steps.

    If all that the requests can use is an eighth of the free memory or less, they have it, and nothing is compiled.

    Raises:
        ValueError: No two pages fit.
    """
    stats = memory_stats()
    if "bytes_limit" not in stats:
        return config
    limit, free = stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"]
    most_pages = config.max_num_seqs * config.max_pages
    served = served_model(model, config, draft_model=draft_model)
    page_bytes = sum(group.page_bytes(config.page_size, config.pool_dtype) for group in served.kv_groups)
    if config.num_pages > most_pages and config.num_pages * page_bytes <= free // 8:
        return config
    tried = dataclasses.replace(config, num_pages=min(config.num_pages, _TRIED_PAGES))
    pool, state = fitting_pool(served.kv_groups, tried), made_state(tried, model.vocab_size)
    plans = step_plans(served.steps, (served.weights, state, pool), tried, served.mixed_rows)
    needing_most: dict[str, StepKey] = {}
    for key in sorted(largest_steps(plans), key=lambda key: VARIANTS.index(key.variant)):
        needing_most[key.kind] = key
    needing: dict[Hashable, StepPlan] = {key: plans[key].without_arrays() for key in needing_most.values()}
    state_bytes = sum(bytes_on_one(leaf) for leaf in jax.tree.leaves(state))
    del pool, state
    temporaries = compile_steps(needing, progress=config.progress).temporary_bytes
    beside = state_bytes + temporaries + _largest_product(served.weights) + int(_REST * limit)
    num_pages = default_pages(served.kv_groups, config.page_size, config.pool_dtype, most_pages, beside=beside)
    return dataclasses.replace(config, num_pages=num_pages)


def _largest_product(weights: Any) -> int:
    """Bytes of the largest matrix among the weights, and a quarter for what it is multiplied with, and the result.

    XLA makes a copy of each product's operands to try how it is computed fastest, for steps that are compiled in the
    background too.
    """
    matrices = (leaf for leaf in jax.tree.leaves(weights) if leaf.ndim >= 2)
    # All leading axes are those of layers and experts.
    sizes = (bytes_on_one(leaf) // math.prod(leaf.sharding.shard_shape(leaf.shape)[:-2]) for leaf in matrices)
    return max(sizes, default=0) * 5 // 4
