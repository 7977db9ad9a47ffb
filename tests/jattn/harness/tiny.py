"""A Llama that compiles in a moment, and engines over it that test files share: each compiles what it must."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

import jax.numpy as jnp
from flax import nnx

from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.executor import executor, step_plans
from jattn.serving.request import SamplingParams
from jattn.serving.steps.drafting import NgramDrafting
from jattn_models.llama import LlamaForCausalLM
from jattn_models.llama_config import LlamaConfig

VOCAB = 512
CONFIG = EngineConfig(
    num_pages=17, page_size=4, max_num_seqs=4, max_context_len=64, prefill_tokens=16, prefill_seqs=1, max_stop_ids=1
)
_VARIANTS, _ASKED = step_plans.VARIANTS, step_plans._asked


@functools.cache
def tiny_model():
    """Random weights, the embedding apart from the projection to logits."""
    llama = LlamaConfig.from_dict(
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
    )
    return LlamaForCausalLM(llama, dtype=jnp.float32, rngs=nnx.Rngs(0))


@functools.cache
def tiny_engine():
    """One bucket for each step, so that tokens compare exactly. Tests share it, and leave it idle."""
    with all_variants():
        return Engine(tiny_model(), CONFIG)


@functools.cache
def drafting_engine():
    """Drafts by prompt lookup; serves within `one_variant("full")` alone. Tests share it, and leave it idle."""
    drafter = NgramDrafting(num_draft_tokens=3)
    with one_variant("full"):
        return Engine(tiny_model(), dataclasses.replace(CONFIG, num_pages=19, speculative=drafter))


@contextlib.contextmanager
def all_variants() -> Iterator[None]:
    """Engines made inside compile all variants, though tests around have one: other tests share them."""
    with mock.patch.multiple(step_plans, VARIANTS=_VARIANTS, _asked=_ASKED):
        yield


@contextlib.contextmanager
def one_variant(name) -> Iterator[None]:
    """Engines made inside compile one variant of each step, and all requests served inside take it."""
    with mock.patch.multiple(step_plans, VARIANTS=(name,), _asked=lambda requests: name):
        yield


def with_steps_of(other):
    """A new engine like another one, with its compiled steps."""
    with mock.patch.object(executor, "compile_steps", return_value=other.executor.compiled_steps):
        return Engine(tiny_model(), other.config)


def plans_of(config, model=None, **arguments):
    """An engine whose steps are the plans for them, none compiled."""
    with mock.patch.object(executor, "compile_steps", lambda plans, **options: plans):
        return Engine(model or tiny_model(), config, **arguments)


def sampled(seed, max_tokens):
    """Random tokens, the same whatever the neighbours: no two requests write alike."""
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed)


def run(engine, requests=()):
    """The requests' tokens once all are served."""
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert engine.kv_cache.is_free
    return [request.generated for request in requests]
