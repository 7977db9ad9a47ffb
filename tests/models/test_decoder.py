"""Every architecture against transformers, through the paged pool and the serving loop; see make_golden.py."""

import contextlib
import dataclasses
from importlib.metadata import entry_points

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.checkpoint import Checkpoint
from jattn.flash_attention import FlashAttentionBackend, FlashAttentionConfig
from jattn.kv_pool import make_pool
from jattn.matmul import matmul_splits
from jattn.norm import Unnormed, taken
from jattn_models.layer_pattern import Segment
from jattn_models.phi3 import Phi3ForCausalLM
from tests.careful import compiled_with_care
from tests.kernels.harness.splits import splits_of
from tests.models.harness.goldens import (
    GOLDEN,
    LLAMA_CASES,
    OTHER_CASES,
    TOLERANCE,
    WRAPPED_CASES,
    architecture,
    assert_golden,
    assert_run_is_golden,
    assert_shares_are_golden,
    dense_logits,
    golden,
    load,
    paged_run,
    prompts,
    sequence,
)
from tests.models.harness.served import assert_served_greedily
from tests.often import often, slow


def test_every_announced_architecture_has_a_golden_checkpoint():
    announced = {point.name for point in entry_points(group="jattn.models") if point.module.startswith("jattn_models.")}
    assert {architecture(case) for case in (*LLAMA_CASES, *WRAPPED_CASES, *OTHER_CASES)} == announced
    assert len(announced) == 28


# Of a kind with another case, or held against transformers in a test below, in test_latent_prompts, test_latent_llm or
# test_gpt_oss; they are in the slow tests.
ALIKE = ("glm4_moe", "ministral", "mixtral", "olmo2", "qwen2", "qwen3", "smollm3", "starcoder2")
ELSEWHERE = ("deepseek_v2", "deepseek_v3", "gemma3", "glm4_moe_lite", "gpt_oss", "llama4", "phi3_longrope", "qwen2_moe")


@pytest.mark.parametrize("case", often(OTHER_CASES, set(OTHER_CASES) - {*ALIKE, *ELSEWHERE, "qwen3_moe"}))
def test_paged_logits_match_transformers(case):
    # Compiled in haste, phi3_longrope is off by nine tenths of the tolerance, the others by less than half of it.
    with compiled_with_care() if case == "phi3_longrope" else contextlib.nullcontext():
        assert_run_is_golden(case, page_size=8)


# Norms before or on both sides of attention; a factor on additions; heads that are normed; routers; biases.
@pytest.mark.parametrize("case", often(["gqa", "gemma3", "granite", "qwen3_moe", "gpt_oss"], ("qwen3_moe",)))
def test_what_products_leave_to_be_added_up_is(case, monkeypatch):
    def in_splits(x, kernel, **options):
        seen.append(isinstance(x, Unnormed))
        return splits_of(matmul_splits(taken(x), kernel, **options))

    seen = []
    for module in ("layers", "router"):
        monkeypatch.setattr(f"jattn_models.{module}.matmul_splits", in_splits)
    jax.clear_caches()  # of tests that traced the model without
    assert_run_is_golden(case, page_size=8)
    assert {True, False} == set(seen)
    jax.clear_caches()


# Windows in some layers, and chunks.
@pytest.mark.parametrize(
    ("case", "surface", "page_size"),
    [
        ("gemma3", "flashinfer", 8),
        slow("gemma3", "vllm_v1", 16),
        slow("llama4", "vllm_v1", 8),
    ],
)
def test_paged_logits_through_another_surface_match_transformers(case, surface, page_size):
    assert_run_is_golden(case, page_size=page_size, surface=surface)


def test_chunked_layers_are_refused_by_a_surface_without_chunks():
    with pytest.raises(NotImplementedError, match="`chunk_size` must be None in layers of a FlashInfer backend: use"):
        paged_run("llama4", page_size=8, surface="flashinfer")


# What the engine sees of the others: mixtures, biases. For latent rows see test_latent_llm, for windows and chunks
# test_windowed_passes, for sinks test_gpt_oss.
SERVED = ("qwen2_moe",)


@pytest.mark.parametrize("case", often([*OTHER_CASES, *WRAPPED_CASES], SERVED))
def test_served_greedy_tokens_match_transformers(case):
    """And again when the prompts' keys are in the pool."""
    requests = assert_served_greedily(case)
    assert all(request.num_cached_tokens == (len(request.prompt) - 1) // 8 * 8 for request in requests)
    assert any(request.num_cached_tokens for request in requests)


# What is split by a rule of its own: latents, fused projections, norms of all heads, experts beside a shared one.
@pytest.mark.parametrize("case", often(OTHER_CASES, ("glm4_moe_lite", "olmo2", "phi3", "qwen2_moe")))
def test_two_shares_give_the_whole_models_logits(case):
    assert_shares_are_golden(Checkpoint(GOLDEN / case), golden(case, "tokens")[2], golden(case)[2])


@pytest.mark.parametrize("case", often(["olmoe", "phi3", "glm4"], ("olmoe", "glm4")))
def test_devices_that_have_the_same_heads_of_keys_give_the_whole_models_logits(case):
    """The norm of all keys together (olmoe), one tensor of all three (phi3), biases and heads reordered (glm4)."""
    assert_shares_are_golden(Checkpoint(GOLDEN / case), golden(case, "tokens")[2], golden(case)[2], size=4)


@pytest.mark.parametrize("case", often(["mixtral", "llama4", "qwen2_moe", "gpt_oss"], ("llama4",)))
def test_devices_that_share_experts_whole_give_the_whole_models_logits(case):
    """The weight is on what an expert is given (llama4); beside an expert that is not shared so (the two); biases."""
    assert_shares_are_golden(Checkpoint(GOLDEN / case), golden(case, "tokens")[2], golden(case)[2], by_expert=True)


# What a second chunk of a prompt can get wrong is what its tokens see: a mixture has a token at a time.
IN_CHUNKS = ("deepseek_v2", "glm4_moe", "llama4", "mistral", "mixtral", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize("case", often(IN_CHUNKS, ("llama4",)))
def test_prefill_in_two_chunks_matches_transformers(case):
    run = paged_run(case, page_size=8)
    first = run.extend([row[: len(row) // 2] for row in prompts(case)])
    second = run.extend([row[len(row) // 2 :] for row in prompts(case)])
    for expected, *parts in zip(golden(case), first, second, strict=True):
        logits = np.concatenate(parts)
        assert_golden(logits, expected[: len(logits)])


def with_config(model, config):
    """The model's weights under another configuration."""
    other = nnx.eval_shape(lambda: type(model)(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(other), nnx.state(model))


SEES_ALL = {"window_left": None, "chunk_size": None}


# What a kind of layer or a configuration says, the tokens that do not depend on it, and it left out. Goldens that tell
# it tell it again as long as they are what they are.
@pytest.mark.parametrize(
    ("case", "indifferent", "kind", "fact"),
    [
        ("gemma2", 1, {}, {"attention_cap": None}),
        slow("gemma2", 8, SEES_ALL, {}),
        slow("gemma3", 8, SEES_ALL, {}),
        ("llama4", 8, SEES_ALL, {}),
        slow("gpt_oss", 8, SEES_ALL, {}),
        slow("granite", 0, {}, {"embedding_scale": 1.0}),
        slow("granite", 0, {}, {"residual_scale": 1.0}),
        slow("granite", 0, {}, {"logit_scale": 1.0}),
        slow("granite", 1, {}, {"attention_scale": None}),
        ("ministral3", 8, {}, {"temperature": None}),
        slow("mistral", 8, SEES_ALL, {}),
        slow("olmo3", 1, {"rope": "global"}, {}),
        slow("phi3", 8, SEES_ALL, {}),
        slow("smollm3", 1, {"rope": "global"}, {}),
        slow("gemma3", 1, {"rope": "global"}, {}),
        slow("gemma3", 0, {}, {"logit_cap": None}),
        slow("llama4", 1, {"rope": "global"}, {"temperature": None}),
        slow("llama4", 7, {}, {"temperature": None}),
    ],
)
def test_golden_logits_need_what_the_layers_say(case, indifferent, kind, fact):
    whole = load(case)
    segments = tuple(
        Segment(segment.layers, tuple(dataclasses.replace(each, **kind) for each in segment.period))
        for segment in whole.config.segments
    )
    config = dataclasses.replace(whole.config, **{"segments": segments, **fact})
    without = with_config(whole, config)
    tokens, expected = golden(case, "tokens")[2], golden(case)[2]
    logits = np.asarray(dense_logits(without, tokens))
    if indifferent:
        assert_golden(logits[:indifferent], expected[:indifferent])
    assert np.abs(logits[indifferent:] - expected[indifferent:]).max(axis=-1).min() > TOLERANCE


# What the configuration of a mixture says, or of the attention beside it, and another word of it.
@pytest.mark.parametrize(
    ("case", "routing", "fact"),
    [
        slow("deepseek_v2", {"group_score": "two_best"}, {}),
        slow("deepseek_v2", {"num_groups": 1, "groups_per_token": 1}, {}),
        slow("deepseek_v3", {}, {"attention_scale": 20**-0.5}),
        slow("glm4_moe", {"group_score": "best"}, {}),
        slow("glm4_moe", {"groups_per_token": 4}, {}),
        slow("glm4_moe", {"scaling_factor": 1.0}, {}),
        slow("glm4_moe", {"normalised": False}, {}),
        slow("glm4_moe", {"scoring": "softmax"}, {}),
        slow("gpt_oss", {"scoring": "softmax", "normalised": False}, {}),
        slow("olmoe", {"normalised": False}, {}),
        ("olmoe", {}, {"qkv_clip": None}),
        slow("qwen2_moe", {"normalised": True}, {}),
        slow("qwen2_moe", {"scoring": "sigmoid"}, {}),
    ],
)
def test_golden_logits_need_what_the_mixture_says(case, routing, fact):
    whole = load(case)
    experts = dataclasses.replace(
        whole.config.experts, routing=dataclasses.replace(whole.config.experts.routing, **routing)
    )
    config = dataclasses.replace(whole.config, experts=experts, **fact)
    other = with_config(whole, config)
    logits = dense_logits(other, golden(case, "tokens")[2])
    assert np.abs(np.asarray(logits) - golden(case)[2]).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("case", "lengths", "windows"),
    [
        slow("gemma2", [2], {-1, 7}),
        ("gemma3", [5, 1], {-1, 7}),
        slow("glm4_moe", [1, 2], {-1}),
        ("gpt_oss", [2], {-1, 7}),
        ("llama4", [3, 1], {-1}),
        slow("ministral", [2], {-1, 7}),
        ("mistral", [2], {7}),
        ("olmo3", [3, 1], {-1, 7}),
        ("qwen2", [1, 2], {-1, 7}),
        ("qwen2_moe", [1, 1, 1], {-1, 7}),
        slow("qwen3", [2], {-1, 7}),
        slow("qwen3_moe", [2, 1], {-1}),
        slow("smollm3", [2], {-1, 7}),
    ],
)
def test_layers_are_scanned_by_period(case, lengths, windows):
    model = load(case)
    backend = FlashAttentionBackend(FlashAttentionConfig(max_context_len=16, page_size=8))
    pool = make_pool(model.kv_groups, num_pages=3, page_size=8, dtype=jnp.float32)
    batch = sequence(jnp.zeros(4, jnp.int32), groups=len(pool.groups))
    jaxpr = jax.make_jaxpr(lambda pool: model(batch, backend.init_forward_metadata(batch), backend, pool))(pool)
    scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert [scan.params["length"] for scan in scans] == lengths
    assert {layer.sliding_window_size for layer in model.attention_layers} == windows
    chunks = {layer.chunk_size for layer in model.attention_layers}
    assert len(model.attention_layers) == len(windows) * len(chunks)
    assert chunks == ({8, None} if case == "llama4" else {None})


@pytest.mark.parametrize(
    "case", ["deepseek_v3", "glm4", "glm4_moe", "gpt_oss", "llama4", "phi3", "phi3_longrope", "yarn"]
)
def test_rope_frequencies_match_transformers(case):
    with np.load(GOLDEN / case / "golden.npz") as arrays:
        np.testing.assert_allclose(load(case).config.rope.frequencies(), arrays["frequencies"], rtol=1e-6)


@pytest.mark.parametrize("case", ["gemma3", "olmo3"])
def test_local_rope_frequencies_match_transformers(case):
    with np.load(GOLDEN / case / "golden.npz") as arrays:
        config = load(case).config
        np.testing.assert_allclose(config.rope.frequencies(), arrays["frequencies"], rtol=1e-6)
        np.testing.assert_allclose(config.local_rope.frequencies(), arrays["local_frequencies"], rtol=1e-6)


@pytest.mark.usefixtures("compiled_with_care")
@pytest.mark.parametrize(("max_context_len", "kind"), [(16, "short"), (17, "long")])
def test_longrope_goes_by_the_longest_text_that_is_served(max_context_len, kind):
    checkpoint = Checkpoint(GOLDEN / "phi3_longrope").for_context(max_context_len)
    model = Phi3ForCausalLM.from_checkpoint(checkpoint, dtype=jnp.float32)
    tokens, long = golden("phi3_longrope", "tokens")[2], golden("phi3_longrope")[2]
    with np.load(GOLDEN / "phi3_longrope" / "golden.npz") as arrays:
        expected = arrays["short_logits"] if kind == "short" else long[:16]
        frequencies = arrays["short_frequencies" if kind == "short" else "frequencies"]
    np.testing.assert_allclose(model.config.rope.frequencies(), frequencies, rtol=1e-6)
    assert_golden(dense_logits(model, tokens[:16]), expected)
    assert model.context_len == 96
