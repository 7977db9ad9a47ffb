"""A Llama that compiles in a moment, and an engine of one bucket for each step, so that tokens compare exactly."""

import functools

import jax.numpy as jnp
from flax import nnx

from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import SamplingParams
from jattn_models.llama import LlamaForCausalLM
from jattn_models.llama_config import LlamaConfig

VOCAB = 512
CONFIG = EngineConfig(
    num_pages=17, page_size=4, max_num_seqs=4, max_context_len=64, prefill_tokens=16, prefill_seqs=1, max_stop_ids=1
)


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
    """An engine over the model. Tests share it, and leave it idle."""
    return Engine(tiny_model(), CONFIG)


def sampled(seed, max_tokens):
    """Random tokens, the same whatever the neighbours: no two requests write alike."""
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed)


def run(engine, requests=()):
    """The requests' tokens once all are served."""
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert engine.kv_cache.num_free == engine.kv_cache.num_pages
    return [request.generated for request in requests]
