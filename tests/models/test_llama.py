"""Llama against transformers' logits, through the paged pool; see make_golden.py."""

import dataclasses
import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.checkpoint import Checkpoint
from jattn.flash_attention import FlashAttentionBackend, FlashAttentionConfig
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import make_pool
from jattn.model import model_class
from jattn.parallel import Parallel
from jattn_models.llama import LlamaForCausalLM
from tests.models.paged import PagedRun

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(folder.name for folder in GOLDEN.iterdir())
PROMPT_LENS = (1, 8, 21)
DECODE_STEPS = 32
TOLERANCE = 1e-4
CAPACITY = max(PROMPT_LENS) + DECODE_STEPS


@functools.cache
def load(case, dtype=jnp.float32):
    return LlamaForCausalLM.from_checkpoint(Checkpoint(GOLDEN / case), dtype=dtype)


@functools.cache
def golden(case, kind="logits"):
    with np.load(GOLDEN / case / "golden.npz") as arrays:
        return [arrays[f"{kind}_{number}"] for number in range(len(PROMPT_LENS))]


def prompts(case):
    return [row[:length] for row, length in zip(golden(case, "tokens"), PROMPT_LENS, strict=True)]


def paged_run(case, page_size, dtype=jnp.float32):
    return PagedRun(load(case, dtype), len(PROMPT_LENS), capacity=CAPACITY, page_size=page_size, dtype=dtype)


def assert_golden(logits, expected, tolerance=TOLERANCE):
    chex.assert_tree_all_finite(logits)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("case", CASES)
def test_paged_logits_match_transformers(case, page_size):
    run = paged_run(case, page_size)
    for logits, expected in zip(run.extend(prompts(case)), golden(case), strict=True):
        assert_golden(logits, expected[: len(logits)])
    for step in range(DECODE_STEPS):
        at = [length + step for length in PROMPT_LENS]
        logits = run.decode([row[i] for row, i in zip(golden(case, "tokens"), at, strict=True)])
        assert_golden(logits, np.stack([row[i] for row, i in zip(golden(case), at, strict=True)]))


@pytest.mark.parametrize("case", ["gqa", "llama3_rope"])
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


@pytest.mark.parametrize("case", ["gqa", "tied"])
def test_two_shares_give_the_whole_models_logits(case):
    whole = load(case)
    parallel = Parallel("tensor", 2)
    abstract = nnx.eval_shape(
        lambda: LlamaForCausalLM(whole.config, dtype=jnp.float32, rngs=nnx.Rngs(0), parallel=parallel)
    )
    graph = nnx.graphdef(abstract)
    shares = jax.tree.map(lambda *parts: jnp.stack(parts), *(share(whole, index) for index in range(2)))
    batch = sequence(jnp.asarray(golden(case, "tokens")[2]))

    def logits(model):
        hidden, _ = model(batch, None, DenseBackend(), None)
        return model.compute_logits(hidden)

    both = jax.vmap(lambda state: logits(nnx.merge(graph, state)), axis_name="tensor")(shares)
    for device in both:
        assert_golden(device, golden(case)[2])
    assert abstract.kv_groups[0].num_kv_heads == whole.config.num_kv_heads // 2


def share(model, index):
    """One of two devices' part of a model's state."""
    config = model.config
    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def half(x, axis):
        return jnp.split(x, 2, axis)[index]

    def part(path, x):
        name = ".".join(str(key.key) for key in path if hasattr(key, "key"))
        if "qkv_proj" in name:
            return jnp.concatenate([half(block, -1) for block in jnp.split(x, (q, q + kv), -1)], -1)
        if "gate_up_proj" in name:
            return jnp.concatenate([half(block, -1) for block in jnp.split(x, 2, -1)], -1)
        if "lm_head" in name:
            return half(x, -1)
        if "o_proj" in name or "down_proj" in name:
            return half(x, -2)
        return half(x, 0) if "embedding" in name else x

    return jax.tree_util.tree_map_with_path(part, nnx.state(model))


@dataclasses.dataclass(frozen=True)
class DenseBackend:
    """Attention within the pass, over one sequence; it has no pool."""

    def init_forward_metadata(self, forward_batch):
        return None

    def forward_extend(self, q, k, v, layer, forward_batch, metadata, pool, save_kv_cache=True):
        wide = (x[None].astype(jnp.float32) for x in (q, k, v))
        out = jax.nn.dot_product_attention(*wide, scale=layer.scaling, is_causal=True)
        return out[0].astype(q.dtype), pool

    forward_decode = forward_extend


def sequence(tokens):
    """One sequence from its beginning, in page 1 and the pages after it."""
    index = jnp.arange(len(tokens), dtype=jnp.int32)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=tokens,
        positions=index,
        seq_lens=jnp.array([len(tokens)], jnp.int32),
        cu_q_lens=jnp.array([0, len(tokens)], jnp.int32),
        out_cache_loc=(8 + index,),
        page_tables=(jnp.array([[1, 2]], jnp.int32),),
    )


@pytest.mark.parametrize(("case", "name"), [("gqa", "vocab_size"), ("gqa", "context_len")])
def test_model_says_what_the_serving_loop_asks(case, name):
    config = Checkpoint(GOLDEN / case).config
    fields = {"vocab_size": config["vocab_size"], "context_len": config["max_position_embeddings"]}
    assert getattr(load(case), name) == fields[name]


def test_architecture_names_find_their_class():
    assert model_class("LlamaForCausalLM") is LlamaForCausalLM
    with pytest.raises(ValueError, match=r"'Nope' is unknown. Known: .*LlamaForCausalLM"):
        model_class("Nope")


def test_share_of_a_model_is_not_loaded():
    with pytest.raises(NotImplementedError, match="for one device"):
        LlamaForCausalLM.from_checkpoint(Checkpoint(GOLDEN / "mha"), dtype=jnp.float32, parallel=Parallel("tensor", 2))


def test_heads_that_do_not_divide_over_devices_are_refused():
    config = dataclasses.replace(load("mha").config, num_kv_heads=1)
    with pytest.raises(ValueError, match="`num_key_value_heads` must divide"):
        LlamaForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0), parallel=Parallel("tensor", 2))
