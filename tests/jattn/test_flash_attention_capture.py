"""A replayed step is like the captured one in every mode and bucket, and the whole of it updates the pool in place."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.backend import AttentionLayer, forward
from jattn.flash_attention import FlashAttentionBackend, FlashAttentionConfig, FlashAttentionMultiStepBackend
from jattn.forward_batch import ForwardMode
from jattn.kv_pool import KVGroupSpec, make_pool
from jattn.spec_info import EagleDraftInput, EagleVerifyInput
from tests.jattn.harness.compile_log import compilations
from tests.jattn.harness.sglang_requests import MAX_CONTEXT, NOWHERE, NUM_REQUESTS, random_requests
from tests.often import often_together, slow

NUM_DRAFT, STEPS, BATCHES = 3, 3, 30
LAYER = AttentionLayer(
    layer_id=0, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, head_dim=16, v_head_dim=16, scaling=0.25
)
CONFIG = FlashAttentionConfig(
    max_context_len=MAX_CONTEXT,
    page_size=16,
    layers=(LAYER, dataclasses.replace(LAYER, use_irope=True), dataclasses.replace(LAYER, is_cross_attention=True)),
    attention_chunk_size=64,
    speculative_num_draft_tokens=NUM_DRAFT,
    is_encoder_decoder=True,
    implementation="xla",
)
MASK = EagleVerifyInput(custom_mask=jnp.zeros(4000, bool), positions=jnp.zeros(24, jnp.int32))
# The mode, what it knows of speculation, tokens a row, and the backend.
STEP = FlashAttentionBackend(CONFIG, speculative_step_id=1, topk=1, speculative_num_steps=STEPS)
MODES = {
    "decode": (ForwardMode.DECODE, None, 1, FlashAttentionBackend(CONFIG)),
    "idle": (ForwardMode.IDLE, None, 1, FlashAttentionBackend(CONFIG)),
    "draft_decode": (ForwardMode.DECODE, EagleDraftInput(), 1, STEP),
    "draft_tree": (ForwardMode.DECODE, EagleDraftInput(), 2, dataclasses.replace(STEP, topk=2)),
    "verify": (ForwardMode.TARGET_VERIFY, None, NUM_DRAFT, FlashAttentionBackend(CONFIG)),
    "verify_tree": (ForwardMode.TARGET_VERIFY, MASK, NUM_DRAFT, FlashAttentionBackend(CONFIG)),
}
REQ_TO_TOKEN = jnp.asarray(random_requests(0, 16).req_to_token)


def random_rows(rng, rows):
    """Requests, lengths and encoder lengths of a batch; some are padding."""
    lens = rng.integers(0, 150, rows) * (rng.random(rows) > 0.2)
    numbers = (rng.integers(0, NUM_REQUESTS, rows), lens, rng.integers(0, 60, rows))
    return (jnp.asarray(values, jnp.int32) for values in numbers)


@pytest.mark.parametrize(("bucket", "encoder"), [(1, False), (8, True)])
@pytest.mark.parametrize("name", MODES)
def test_replay_has_the_tree_and_avals_of_the_capture(name, bucket, encoder):
    mode, spec_info, q_len, backend = MODES[name]
    if name == "verify_tree":
        spec_info = dataclasses.replace(spec_info, positions=jnp.zeros(bucket * NUM_DRAFT, jnp.int32))
    rng = np.random.default_rng(bucket)
    requests, lens, encoder_lens = random_rows(rng, bucket)
    capture = functools.partial(backend.init_forward_metadata_capture_cuda_graph, bucket, bucket * q_len)
    captured = jax.eval_shape(
        lambda *rows: capture(*rows, mode, spec_info, req_to_token=REQ_TO_TOKEN),
        *(requests, lens, encoder_lens if encoder else None),
    )

    @jax.jit
    def replay(requests, lens, encoder_lens):
        arguments = (bucket, requests, lens, None, encoder_lens, mode, spec_info, None)
        return backend.init_forward_metadata_replay_cuda_graph(*arguments, req_to_token=REQ_TO_TOKEN)

    for _ in range(BATCHES):
        requests, lens, encoder_lens = random_rows(rng, bucket)
        metadata = replay(requests, lens, encoder_lens if encoder else None)
        chex.assert_trees_all_equal_structs(metadata, captured)
        chex.assert_trees_all_equal_shapes_and_dtypes(metadata, captured)
        padded = np.asarray(lens) == 0 if mode is not ForwardMode.IDLE else np.ones(bucket, bool)
        assert ((np.asarray(metadata.cache_seqlens_int32) == 0) == padded).all()
        assert ((np.asarray(metadata.slots[0]) == NOWHERE) == np.repeat(padded, q_len)).all()
    assert replay._cache_size() == 1


@pytest.mark.parametrize("name", ["decode", "draft_decode", "draft_tree", "verify"])
def test_replay_is_the_metadata_of_the_batch(name):
    """The slots that follow from the requests are those that an engine writes, also if it says them."""
    mode, spec_info, q_len, backend = MODES[name]
    requests = random_requests(2, 16, encoder=True)
    slots = []
    for row, length in enumerate(requests.seq_lens.tolist()):
        begin, count = (length - 1, 1) if name == "decode" else (length, q_len if name == "verify" else q_len * STEPS)
        slots.append(requests.slots(row, begin, begin + count) if length else np.full(count, NOWHERE))
    slots = np.concatenate(slots)
    batch = requests.batch(mode, [slots], len(slots), np.arange(5) * q_len, spec_info=spec_info)
    expected = jax.jit(backend.init_forward_metadata)(batch)

    @jax.jit
    def replay(batch, out_cache_loc):
        rows = (batch.req_pool_indices, batch.seq_lens, None, batch.encoder_lens, mode, spec_info, None)
        table = batch.req_to_token_pool.req_to_token
        return backend.init_forward_metadata_replay_cuda_graph(4, *rows, out_cache_loc, req_to_token=table)

    for out_cache_loc in (None, batch.out_cache_loc[0]):
        chex.assert_trees_all_equal(replay(batch, out_cache_loc), expected)


def test_multi_step_replay_has_the_trees_and_avals_of_the_capture():
    backend = FlashAttentionMultiStepBackend(CONFIG, topk=2, speculative_num_steps=STEPS)
    assert [state.max_num_tokens for state in backend.init_cuda_graph_state(4)] == [8] * STEPS
    requests = random_requests(2, 16, encoder=True)
    batch = requests.batch(ForwardMode.DECODE, [], 4 * 2 * STEPS, np.arange(5) * 2, spec_info=EagleDraftInput())
    captured = jax.eval_shape(backend.init_forward_metadata_capture_cuda_graph, batch)
    fewer = jax.tree.map(lambda leaf: leaf[:3] if leaf.shape[:1] == (4,) else leaf, batch)
    fewer = dataclasses.replace(fewer, out_cache_loc=(batch.out_cache_loc[0][: 3 * 2 * STEPS],))
    replay = jax.jit(backend.init_forward_metadata_replay_cuda_graph, static_argnums=1)
    replayed = replay(fewer, 4)
    assert len(replayed) == STEPS - 1
    chex.assert_trees_all_equal_structs(replayed, captured)
    chex.assert_trees_all_equal_shapes_and_dtypes(replayed, captured)
    rng = np.random.default_rng(0)
    batches = [tuple(random_rows(rng, 3)) for _ in range(500)]
    with compilations() as compiled:
        for rows in batches:
            given = dict(zip(("req_pool_indices", "seq_lens", "encoder_lens"), rows, strict=True))
            lens = np.asarray(replay(dataclasses.replace(fewer, **given), 4)[1].cache_seqlens_int32)
            drafted = np.where(np.asarray(rows[1]) > 0, 2 * STEPS, 0)
            assert lens.tolist() == [*(np.asarray(rows[1]) + drafted), 0]
    assert not compiled


@pytest.mark.parametrize(
    ("name", "latent"),
    often_together(
        itertools.product(("decode", "verify", "extend"), (False, True)), [("decode", True), ("extend", False)]
    ),
)
def test_step_updates_the_donated_pool_in_place(name, latent):
    arch = "MLA" if latent else "MHA"
    config = dataclasses.replace(CONFIG, layers=(), is_encoder_decoder=False, attention_arch=arch)
    backend = FlashAttentionBackend(config)
    heads = {"tp_k_head_num": 1, "v_head_dim": 8} if latent else {}
    layer = dataclasses.replace(LAYER, **heads)
    group = KVGroupSpec(
        name="all", num_layers=2, num_kv_heads=layer.tp_k_head_num, head_dim=16, v_head_dim=layer.v_head_dim,
        latent=latent,
    )  # fmt: skip
    pool = make_pool((group,), num_pages=4000, page_size=16, dtype=jnp.float32)
    mode = {"extend": ForwardMode.EXTEND}.get(name) or MODES[name][0]
    tokens = 64 if name == "extend" else 4 * MODES[name][2]
    batch = random_requests(1, 16).batch(mode, [], tokens, np.arange(5))

    def step(q, k, v, batch, pool):
        metadata = backend.init_forward_metadata(batch)

        def of_layer(carry, layer_id):
            total, pool = carry
            out, pool = forward(backend, q, k, v, dataclasses.replace(layer, layer_id=layer_id), batch, metadata, pool)
            return (total + out, pool), None

        total = jnp.zeros((tokens, 4, layer.v_head_dim))
        return jax.lax.scan(of_layer, (total, pool), jnp.arange(2, dtype=jnp.int32))[0]

    k_heads = layer.tp_k_head_num
    q, k, v = (jnp.zeros((tokens, n, w)) for n, w in ((4, 16), (k_heads, 16), (k_heads, layer.v_head_dim)))
    memory = jax.jit(step, donate_argnums=4).lower(q, k, v, batch, pool).compile().memory_analysis()
    pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4  # less than one layer's keys


@pytest.mark.parametrize("name", [slow("decode"), slow("draft_decode"), "draft_tree", slow("idle"), "verify"])
def test_whole_step_replays_500_random_batches_without_compiling(name):
    mode, spec_info, q_len, backend = MODES[name]
    pool = make_pool(
        (KVGroupSpec(name="all", num_layers=1, num_kv_heads=2, head_dim=16),),
        num_pages=random_requests(0, 16).num_pages,
        page_size=16,
        dtype=jnp.float32,
    )
    batch = random_requests(0, 16).batch(mode, [], 4 * q_len, np.arange(5) * q_len)
    layer = CONFIG.layers[0 if name == "draft_tree" else 1]  # chunks serve no trees

    @functools.partial(jax.jit, donate_argnums=3)
    def step(requests, lens, q, pool):
        arguments = (4, requests, lens, None, None, mode, spec_info, None)
        metadata = backend.init_forward_metadata_replay_cuda_graph(*arguments, req_to_token=REQ_TO_TOKEN)
        return forward(backend, q, q[:, :2], q[:, 2:], layer, batch, metadata, pool)

    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(4 * q_len, 4, 16)), jnp.float32)
    batches = [tuple(random_rows(rng, 4))[:2] for _ in range(500)]
    _, pool = step(*batches[0], q, pool)
    with compilations() as compiled:
        for requests, lens in batches:
            out, pool = step(requests, lens, q, pool)
            written = np.repeat(np.asarray(lens) > 0, q_len) & (mode is not ForwardMode.IDLE)
            assert (np.asarray(out).any(axis=(1, 2)) == written).all()
    assert not compiled
