"""Llama against transformers' logits, through the paged pool; see make_golden.py."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.checkpoint import Checkpoint
from jattn.flash_attention import FlashAttentionBackend, FlashAttentionConfig
from jattn.kv_pool import make_pool
from jattn.model import model_class
from jattn.parallel import Parallel
from jattn_models.llama import LlamaForCausalLM
from tests.models.harness.goldens import (
    GOLDEN,
    LLAMA_CASES,
    DenseBackend,
    assert_golden,
    assert_run_is_golden,
    assert_shares_are_golden,
    golden,
    load,
    paged_run,
    prompts,
    sequence,
)
from tests.often import often, slow


# As many heads of keys as queries change nothing else; tied weights and bfloat16 have tests below.
@pytest.mark.parametrize("case", often(LLAMA_CASES, ("biased", "gqa", "llama3_rope", "yarn")))
def test_paged_logits_match_transformers(case):
    assert_run_is_golden(case, page_size=8)


# The model does not see the size of a page; that every surface serves each size is test_surfaces'.
@pytest.mark.parametrize("case", ["gqa", *(slow(case) for case in LLAMA_CASES if case != "gqa")])
def test_paged_logits_over_larger_pages_match_transformers(case):
    assert_run_is_golden(case, page_size=16)


@pytest.mark.parametrize("case", ["gqa", slow("llama3_rope")])
def test_prefill_in_two_chunks_matches_transformers(case):
    run = paged_run(case, page_size=8)
    first = run.extend([row[: len(row) // 2] for row in prompts(case)])
    second = run.extend([row[len(row) // 2 :] for row in prompts(case)])
    for expected, *parts in zip(golden(case), first, second, strict=True):
        logits = np.concatenate(parts)
        assert_golden(logits, expected[: len(logits)])


def test_bfloat16_rounds_no_worse_than_transformers():
    exact, twin = (np.concatenate(golden("bfloat16", kind)) for kind in ("logits", "twin_logits"))
    floor = float(jnp.finfo(jnp.bfloat16).eps) * np.abs(exact).max()
    tolerance = 2 * np.abs(twin - exact).max() + floor
    run = paged_run("bfloat16", page_size=8, dtype=jnp.bfloat16)
    for logits, expected in zip(run.extend(golden("bfloat16", "tokens")), golden("bfloat16"), strict=True):
        assert logits.dtype == np.float32
        assert_golden(logits, expected, tolerance)


@pytest.mark.parametrize("case", ["mha", "llama3_rope"])
def test_rope_frequencies_match_transformers(case):
    with np.load(GOLDEN / case / "golden.npz") as arrays:
        np.testing.assert_allclose(load(case).config.rope.frequencies(), arrays["frequencies"], rtol=1e-6)


def test_layers_are_stacked_in_few_leaves():
    config = load("gqa").config
    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width, units, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    shapes = {
        ".".join(map(str, path)): variable.get_value().shape
        for path, variable in nnx.to_flat_state(nnx.state(load("gqa")))
    }
    assert shapes == {
        "vocabulary.embedding": (vocab, width),
        "vocabulary.lm_head.kernel": (width, vocab),
        "layers.0.input_norm.scale": (3, width),
        "layers.0.attention.qkv_proj.kernel": (3, width, q + 2 * kv),
        "layers.0.attention.o_proj.kernel": (3, q, width),
        "layers.0.post_attention_norm.scale": (3, width),
        "layers.0.mlp.gate_up_proj.kernel": (3, width, 2 * units),
        "layers.0.mlp.down_proj.kernel": (3, units, width),
        "norm.scale": (width,),
    }


def test_forward_is_one_scan_over_layers():
    model = load("gqa")
    backend = FlashAttentionBackend(FlashAttentionConfig(max_context_len=16, page_size=8))
    pool = make_pool(model.kv_groups, num_pages=3, page_size=8, dtype=jnp.float32)
    batch = sequence(jnp.zeros(4, jnp.int32))
    jaxpr = jax.make_jaxpr(lambda pool: model(batch, backend.init_forward_metadata(batch), backend, pool))(pool)
    scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert [scan.params["length"] for scan in scans] == [model.config.num_layers]
    assert sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns) == 0


def test_random_model_computes_without_a_pool():
    model = LlamaForCausalLM(load("tied").config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    batch = sequence(jnp.arange(5, dtype=jnp.int32))
    hidden, pool = model(batch, None, DenseBackend(), None)
    assert pool is None
    assert hidden.dtype == jnp.bfloat16
    logits = model.compute_logits(hidden)
    chex.assert_shape(logits, (5, model.vocab_size))
    assert logits.dtype == jnp.float32
    layers = jax.tree.leaves(nnx.state(model.layers[0].mlp))
    assert all(not np.array_equal(stacked[0], stacked[1]) for stacked in layers)


@pytest.mark.parametrize("case", ["biased", "gqa", "tied"])
def test_two_shares_give_the_whole_models_logits(case):
    assert_shares_are_golden(Checkpoint(GOLDEN / case), golden(case, "tokens")[2], golden(case)[2])


@pytest.mark.parametrize(("case", "name"), [("gqa", "vocab_size"), ("gqa", "context_len")])
def test_model_says_what_the_serving_loop_asks(case, name):
    config = Checkpoint(GOLDEN / case).config
    fields = {"vocab_size": config["vocab_size"], "context_len": config["max_position_embeddings"]}
    assert getattr(load(case), name) == fields[name]


def test_architecture_names_find_their_class():
    assert model_class("LlamaForCausalLM") is LlamaForCausalLM
    with pytest.raises(ValueError, match=r"'Nope' is unknown. Known: .*LlamaForCausalLM"):
        model_class("Nope")


def test_heads_that_do_not_divide_over_devices_are_refused():
    config = dataclasses.replace(load("mha").config, num_q_heads=6, num_kv_heads=3)
    with pytest.raises(ValueError, match="`num_key_value_heads` must divide"):
        LlamaForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0), parallel=Parallel("tensor", 2))
