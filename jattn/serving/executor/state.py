"""The loop state of an engine that has served nobody yet."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jattn.device_mesh import made
from jattn.serving.resolved_config import ResolvedConfig
from jattn.serving.steps.logit_rules import empty_history
from jattn.serving.steps.loop_state import NOT_KNOWN, LoopState, TokenRecord, empty_rows


def empty_state(config: ResolvedConfig, vocab_size: int) -> LoopState:
    """Rows that no request uses yet, with all that the engine's requests may need."""
    state = empty_rows(
        config.max_num_seqs,
        max_pages=config.max_pages,
        max_stop_ids=config.max_stop_ids,
        max_logit_bias=config.max_logit_bias if config.full_sampling else None,
        with_limits=config.speculative is not None,
        num_lists=1 + len(config.windows),
    )
    if state.tokens:
        ids = jnp.full((config.max_num_seqs, config.max_context_len), NOT_KNOWN, jnp.int32)
        state = dataclasses.replace(state, tokens=TokenRecord(limits=state.tokens.limits, ids=ids))
    if not config.full_sampling:
        return state
    history = empty_history(config.max_num_seqs, vocab_size, config.max_context_len)
    return dataclasses.replace(state, history=history)


def made_state(config: ResolvedConfig, vocab_size: int) -> LoopState:
    """The same on the device, or on each of those that share the model.

    Raises:
        ValueError: It does not fit the memory.
    """
    make = jax.jit(functools.partial(empty_state, config, vocab_size))
    try:
        return jax.block_until_ready(made(make, config.parallel, shares=False))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            "`max_num_seqs` or `max_context_len` must be lower: what the device keeps of each request needs more "
            f"memory than there is. Got max_num_seqs={config.max_num_seqs}, max_context_len={config.max_context_len}."
        ) from error
