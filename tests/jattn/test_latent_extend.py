"""Prompts over latent rows, of which keys and values are made: the absorbed form's output, in parts and mixtures."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.attention import latent_plan
from jattn.attention.latent_form import choose_fewest_expanded
from jattn.attention.latent_plan import LatentPlan
from jattn.attention.paged import PagedAttentionBackend
from jattn.backend import AttentionLayer, BackendOptions, HeadWidths, LatentHeads, backend_class, forward_latent
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_cache_dtype import stored_dtype
from jattn.kv_pool import KVGroupSpec, make_pool
from jattn_kernels import AttentionSpec, serve
from jattn_kernels.call import Device
from tests.kernels.harness.triton_interpreter import interpreted
from tests.often import often

HEADS, LATENT, ROPE, WIDTHS = 2, 16, 8, HeadWidths(nope=16, value=8)
PAGE, MAX_PAGES, LAYERS = 4, 12, 2
LAYER = AttentionLayer(
    layer_id=1,
    tp_q_head_num=HEADS,
    tp_k_head_num=1,
    tp_v_head_num=1,
    head_dim=LATENT + ROPE,
    v_head_dim=LATENT,
    scaling=0.3,
    kv="latent",
    head_widths=WIDTHS,
)
SPEC = KVGroupSpec(name="all", num_layers=LAYERS, num_kv_heads=1, head_dim=24, v_head_dim=16, latent=True)
OPTIONS = BackendOptions(max_context_len=PAGE * MAX_PAGES, page_size=PAGE, max_num_seqs=8, dtype="float32")


@dataclasses.dataclass(frozen=True)
class Lens:
    """New tokens and tokens before them of each sequence, padded tokens of the launch, and its mode."""

    new: tuple[int, ...]
    before: tuple[int, ...]
    padding: int = 0
    mode: ForwardMode = ForwardMode.EXTEND


CASES = {
    "no_prefix": Lens((13,), (0,)),
    "prefix_within_a_part": Lens((9,), (7,)),
    "prefix_of_several_parts": Lens((9,), (37,)),
    "unequal_and_empty": Lens((9, 0, 5, 1, 12, 0), (0, 0, 30, 21, 3, 17), padding=3),
    "short_ones_beside": Lens((2, 9, 3, 1), (30, 11, 0, 5), padding=1),
    "more_short_ones_than_room": Lens((4, 4, 4, 9), (5, 6, 7, 8)),
    "mixed": Lens((9, 2, 1, 1, 0, 1), (20, 13, 40, 1, 0, 19), padding=2, mode=ForwardMode.MIXED),
}


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def batch_of(lens):
    """The batch, and the places of each sequence's tokens; pages in random order."""
    new, before = np.array(lens.new), np.array(lens.before)
    cu, tokens = np.cumsum([0, *new]), sum(new) + lens.padding
    order = np.random.default_rng(0).permutation(np.arange(1, 1 + len(new) * MAX_PAGES))
    table = order.reshape(len(new), MAX_PAGES)
    owner = np.repeat(np.arange(len(new)), new)
    position = np.concatenate([np.arange(b, b + n) for b, n in zip(before, new, strict=True)])
    slots = np.full(tokens, 10_000)
    slots[: len(owner)] = table[owner, position // PAGE] * PAGE + position % PAGE
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    return ForwardBatch(
        forward_mode=lens.mode,
        input_ids=jnp.zeros(tokens, jnp.int32),
        positions=jnp.zeros(tokens, jnp.int32),
        seq_lens=ints(new + before),
        cu_q_lens=ints(cu),
        out_cache_loc=(ints(slots),),
        page_tables=(ints(table),),
    )


def pool_of(lens, batch, dtype, scale):
    """The rows that were there before; what nobody owns is NaN."""
    pool = make_pool((SPEC,), num_pages=1 + len(lens.new) * MAX_PAGES, page_size=PAGE, dtype=dtype)
    nan = 0xFF if dtype == jnp.uint8 else jnp.nan  # all bits are NaN in each part of a packed row
    pool = jax.tree.map(lambda pages: jnp.full_like(pages, nan), pool)
    table = np.asarray(batch.page_tables[0])
    owner = np.repeat(np.arange(len(lens.new)), lens.before)
    position = np.concatenate([np.arange(length) for length in lens.before])
    slots = jnp.asarray(table[owner, position // PAGE] * PAGE + position % PAGE, jnp.int32)
    return pool.written(LAYER, slots, random(5, len(slots), 1, LATENT + ROPE), None, scale)


def attended(lens, fewest, *, layer=LAYER, kv_cache_dtype="auto", surface="paged"):
    """Output by real token of one pass, and the pool."""
    batch = batch_of(lens)
    options = dataclasses.replace(OPTIONS, kv_cache_dtype=kv_cache_dtype)
    if surface == "paged":
        backend = dataclasses.replace(PagedAttentionBackend.for_model((layer,), options), fewest_expanded=fewest)
    else:
        backend = backend_class(surface).for_model((layer,), options)
    pool = pool_of(lens, batch, stored_dtype(kv_cache_dtype, jnp.float32, latents=True), layer.k_scale)
    tokens = len(batch.input_ids)
    queries = random(1, tokens, HEADS, WIDTHS.nope), random(2, tokens, HEADS, ROPE)
    heads = LatentHeads(random(3, HEADS, WIDTHS.nope, LATENT), random(4, HEADS, WIDTHS.value, LATENT))

    @jax.jit
    def one_pass(batch, pool):
        metadata = backend.init_forward_metadata(batch)
        rows = random(6, tokens, 1, LATENT + ROPE)
        out, pool = forward_latent(backend, *queries, rows, heads, layer, batch, metadata, pool)
        return out, pool, metadata

    out, pool, metadata = one_pass(batch, pool)
    return np.asarray(out)[: sum(lens.new)], pool, metadata.schedules[0]


@pytest.fixture(autouse=True)
def _parts_of_eight_tokens(monkeypatch):
    """And room for eight tokens of short extends; the least part of a prefix is what a launch has new."""
    monkeypatch.setattr(latent_plan, "_PART_BYTES", 0)
    monkeypatch.setattr(latent_plan, "_MOST_SHORT", 8)


def assert_alike(lens, fewest=5, **facts):
    absorbed, before, plan = attended(lens, 10**6, **facts)
    assert not isinstance(plan, LatentPlan)
    expanded, after, plan = attended(lens, fewest, **facts)
    assert isinstance(plan, LatentPlan)
    assert np.abs(absorbed).max() > 0.1
    np.testing.assert_allclose(expanded, absorbed, rtol=1e-5, atol=1e-5)
    before, after = (pool.groups[0].k.astype(jnp.float32) for pool in (before, after))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("case", often(CASES, ("prefix_of_several_parts",)))
def test_both_forms_give_the_same(case):
    assert_alike(CASES[case])


def test_prefixes_of_sequences_with_many_new_tokens_are_expanded_and_no_others():
    backend = dataclasses.replace(PagedAttentionBackend.for_model((LAYER,), OPTIONS), fewest_expanded=5)
    mixed, room = (
        jax.jit(backend.init_forward_metadata)(batch_of(CASES[name])).schedules[0]
        for name in ("mixed", "more_short_ones_than_room")
    )
    assert mixed.prefix_starts.tolist() == [0, 20, 20, 20, 20, 20, 20]
    decodes, short = mixed.absorbed
    assert decodes.q_len == 1
    assert decodes.seq_lens.tolist() == [0, 0, 41, 2, 0, 20]
    assert decodes.tokens.tolist() == [16, 16, 11, 12, 16, 13]
    assert short.tokens.tolist() == [9, 10, *[16] * 6]
    assert room.prefix_starts.tolist() == [0, 0, 0, 7, 15]
    assert room.absorbed[0].tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules", [{"sliding_window_size": 6}, {"chunk_size": 8}, {"logit_cap": 2.0}], ids=lambda rules: next(iter(rules))
)
def test_rules_of_a_layer_hold_in_both_forms(rules):
    assert_alike(CASES["unequal_and_empty"], layer=dataclasses.replace(LAYER, **rules))


@pytest.mark.slow
def test_tokens_are_seen_as_the_pool_stores_them():
    """In fp8 with a scale: by those of their own launch too, as they will be by later ones."""
    layer = dataclasses.replace(LAYER, k_scale=jnp.float32(0.25))
    assert_alike(CASES["unequal_and_empty"], layer=layer, kv_cache_dtype="fp8")


def test_tokens_are_seen_as_packed_rows_have_them():
    assert_alike(CASES["unequal_and_empty"], kv_cache_dtype="fp8_ds_mla")


@pytest.mark.slow
def test_sglangs_surface_expands_as_the_engines_own_backend():
    lens = Lens((45,) * 4, (0,) * 4)
    by_surface, _, plan = attended(lens, None, surface="flash_attention")
    assert isinstance(plan, LatentPlan)
    np.testing.assert_array_equal(by_surface, attended(lens, None)[0])


def test_crossover_is_that_of_the_operations_and_bytes():
    """DeepSeek's widths on Hopper: a new token saves 1.5 x 1,088 - 2.5 x 320 operations a head and row, twice."""

    def fewest(num_heads, nope=128, value=128):
        spec = AttentionSpec(num_q_heads=num_heads, num_kv_heads=1, head_dim=576, v_head_dim=512, sm_scale=0.1)
        return choose_fewest_expanded(spec, HeadWidths(nope, value))

    assert fewest(16) == 307
    assert fewest(128) == 294
    assert fewest(20, 192, 256) == 1216  # GLM-4.7-Flash
    assert fewest(16, 2048, 2048) is None  # heads wider than the rows that they come from


DEEPSEEK = dataclasses.replace(
    LAYER, tp_q_head_num=16, head_dim=576, v_head_dim=512, head_widths=HeadWidths(nope=128, value=128)
)


def traced(lens, num_tokens):
    """A pass of DeepSeek's widths in bfloat16, and its arguments' shapes."""
    options = dataclasses.replace(OPTIONS, page_size=64, max_context_len=4096, dtype="bfloat16")
    backend = PagedAttentionBackend.for_model((DEEPSEEK,), options)
    spec = dataclasses.replace(SPEC, head_dim=576, v_head_dim=512)
    batch = jax.eval_shape(lambda: batch_of(dataclasses.replace(lens, padding=num_tokens - sum(lens.new))))
    pool = jax.eval_shape(lambda: make_pool((spec,), num_pages=64, page_size=64, dtype=jnp.bfloat16))
    shapes = ((num_tokens, 16, 128), (num_tokens, 16, 64), (num_tokens, 1, 576), (16, 128, 512), (16, 128, 512))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def one_pass(batch, pool, q_nope, q_pe, rows, k_up, v_up):
        rest = (DEEPSEEK, batch, backend.init_forward_metadata(batch), pool)
        return forward_latent(backend, q_nope, q_pe, rows, LatentHeads(k_up, v_up), *rest)

    return one_pass, (batch, pool, *arrays)


def test_on_hopper_all_is_mosaics(monkeypatch):
    """Ragged rows with their lse, for own tokens and for prefixes, and absorbed decodes and short extends."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    choose, served = serve.choose, []

    def noted(call, implementation):
        choice = choose(call, implementation)
        served.append((call.operation, call.spec.causal, choice.implementation.name))
        return choice

    monkeypatch.setattr(serve, "choose", noted)
    one_pass, arguments = traced(CASES["mixed"], 512)
    with interpreted():
        jax.eval_shape(one_pass, *arguments)
    assert served == [
        ("ragged_extend", True, "mosaic"),
        ("ragged_extend", False, "mosaic"),
        ("mla_decode", True, "mosaic"),
        ("mla_extend", True, "mosaic"),
    ]


@pytest.mark.slow
def test_prompt_and_its_prefix_are_lowered_for_cuda(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    one_pass, arguments = traced(CASES["prefix_of_several_parts"], 512)
    text = jax.jit(one_pass).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def test_layers_of_heads_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="`head_widths` must be None where `kv` is not latent"):
        dataclasses.replace(LAYER, kv="heads")
    layer = dataclasses.replace(LAYER, kv="heads", head_widths=None)
    with pytest.raises(ValueError, match=r"`layer` must read latent rows\. Got kv='heads'"):
        inspect.unwrap(forward_latent)(None, None, None, None, None, layer, None, None, None)


@pytest.mark.slow
def test_pool_is_not_copied():
    """Through a loop over layers, with loops over the parts of prefixes in it."""
    backend = dataclasses.replace(PagedAttentionBackend.for_model((LAYER,), OPTIONS), fewest_expanded=5)
    batch = batch_of(CASES["mixed"])
    heads = LatentHeads(random(3, HEADS, WIDTHS.nope, LATENT), random(4, HEADS, WIDTHS.value, LATENT))
    q_nope, q_pe, rows = (random(1, 16, *shape) for shape in ((HEADS, WIDTHS.nope), (HEADS, ROPE), (1, LATENT + ROPE)))

    def layers(pool, batch):
        metadata = backend.init_forward_metadata(batch)

        def one(number, carry):
            out, pool = carry
            layer = dataclasses.replace(LAYER, layer_id=number)
            more, pool = forward_latent(backend, q_nope + out[..., :1], q_pe, rows, heads, layer, batch, metadata, pool)
            return out + more, pool

        return jax.lax.fori_loop(0, LAYERS, one, (jnp.zeros((16, HEADS, WIDTHS.value)), pool))

    temporary = []
    for num_pages in (100, 5000):
        pool = jax.eval_shape(lambda: make_pool((SPEC,), num_pages=num_pages, page_size=PAGE, dtype=jnp.float32))  # noqa: B023
        compiled = jax.jit(layers, donate_argnums=0).lower(pool, batch).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]
