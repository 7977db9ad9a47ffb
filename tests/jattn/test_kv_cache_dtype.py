"""What names of a KV cache's dtype mean, and an engine whose pool is stored in fp8."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.dtype_names import DTYPE_NAMES
from jattn.kv_cache_dtype import cache_dtype, is_fp8, stored_dtype
from jattn.serving.engine import Engine
from jattn.serving.request import SamplingParams
from tests.jattn.harness.tiny import CONFIG, VOCAB, one_variant, run, tiny_engine, tiny_model

FP8 = {"fp8": jnp.float8_e4m3fn, "fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@pytest.mark.parametrize(("name", "stored"), [("auto", "bfloat16"), ("bfloat16", "bfloat16"), *FP8.items()])
def test_name_says_what_is_stored_beside_bfloat16(name, stored):
    assert stored_dtype(name, jnp.bfloat16) == jnp.dtype(stored)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int8", rf"`kv_cache_dtype` must be auto, fp8_ds_mla, a dtype or one of {', '.join(DTYPE_NAMES)}. Got 'int8'"),
        ("fp8_ds_mla", r"`kv_cache_dtype` may be fp8_ds_mla only where all layers read latent rows, as those of Deep"),
        ("bfloat16", r"`kv_cache_dtype` must be auto, one of fp8, or .* computes in, float32. Got 'bfloat16'"),
    ],
)
def test_engine_with_a_cache_of_what_cannot_be_read_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model(), dataclasses.replace(CONFIG, kv_cache_dtype=name))


def test_surfaces_without_latent_rows_do_not_know_their_format():
    with pytest.raises(ValueError, match=r"`kv_cache_dtype` must be auto, a dtype or one of .* Got 'fp8_ds_mla'"):
        cache_dtype("fp8_ds_mla")
    assert stored_dtype("fp8_ds_mla", jnp.bfloat16, latents=True) == jnp.uint8
    assert not is_fp8("fp8_ds_mla")


def served(engine):
    """Greedy requests of random prompts, some of several prefill launches, once they are served."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    requests = [engine.make_request(rng.integers(0, VOCAB, n).tolist(), params) for n in (3, 40, 21)]
    run(engine, requests)
    return requests


def test_engine_with_an_fp8_pool_is_close_to_one_without():
    with one_variant("full"):
        engine = Engine(tiny_model(), dataclasses.replace(CONFIG, kv_cache_dtype="fp8_e4m3"))
    for requests in (served(engine), served(tiny_engine())):
        assert [len(request.generated) for request in requests] == [8, 8, 8]
    for leaf in jax.tree.leaves(engine.executor.pool):
        chex.assert_type(leaf, jnp.float8_e4m3fn)
    errors = [
        abs(logprobs[token].logprob - exact.prompt_logprobs[place][token].logprob)
        for rounded, exact in zip(served(engine), served(tiny_engine()), strict=True)
        for place, logprobs in rounded.prompt_logprobs.items()
        for token in logprobs
    ]
    # e4m3 rounds a number by a 16th at most; logits of random weights hardly depend on any.
    assert 0 < max(errors) < 1 / 16
