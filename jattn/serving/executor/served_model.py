"""A model as an executor has it: weights, and the steps that take them."""

from typing import Any, NamedTuple

import jax
from flax import nnx

from jattn.backend import backend_class
from jattn.kv_pool import KVGroupSpec
from jattn.matmul import FP8, INT4
from jattn.model import CausalLM
from jattn.serving.executor.mixing import mixed_rows
from jattn.serving.resolved_config import ResolvedConfig
from jattn.serving.steps.draft_model import TargetAndDraft
from jattn.serving.steps.plain import Steps
from jattn.serving.steps.verification import SpeculativeSteps


class ServedModel(NamedTuple):
    """A model, and the one that drafts for it, as steps and what they take.

    Attributes:
        mixed_rows: Rows that a prefill decodes at most.
    """

    weights: Any
    steps: Steps
    kv_groups: tuple[KVGroupSpec, ...]
    mixed_rows: int


def served_model(model: CausalLM, config: ResolvedConfig, *, draft_model: CausalLM | None = None) -> ServedModel:
    """The model by its parts; the weights are the model's own."""
    served = model
    if draft_model is not None:
        served = TargetAndDraft(model, draft_model, max_context_len=config.max_context_len)
    backend = backend_class(config.backend).for_model(served.attention_layers, config.backend_options)
    graph, weights = nnx.split(served)
    parts = (graph, backend, min(config.max_logprobs, model.vocab_size), config.parallel, config.prefill_tokens)
    steps = Steps(*parts) if config.speculative is None else SpeculativeSteps(*parts, drafter=config.speculative)
    return ServedModel(weights, steps, served.kv_groups, mixed_rows(config, backend))


def check_loaded(weights: Any, config: ResolvedConfig) -> None:
    """Says so if a model is not shared by as many devices as it is to be served by, or not quantised as it is to be."""
    counts = {leaf.sharding.num_devices for leaf in jax.tree.leaves(weights) if isinstance(leaf, jax.Array)}
    if counts - {config.tensor_parallel}:
        raise ValueError(
            "`tensor_parallel` must be the number of devices that `jattn.model.load_model` shared the model among, "
            f"{max(counts)}. Got {config.tensor_parallel}."
        )
    held_in = {None: None, "fp8": FP8, "int4": INT4}[config.quantization]
    if held_in is not None and not any(leaf.dtype == held_in for leaf in jax.tree.leaves(weights)):
        raise ValueError(
            "`quantization` must be None for a model that `jattn.model.load_model` was given a checkpoint without it "
            f"for. Got {config.quantization!r}."
        )
