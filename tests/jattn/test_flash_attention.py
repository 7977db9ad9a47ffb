"""The backend agrees with the oracle in both phases, and a replayed step is like the captured one."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jattn.backend import AttentionLayer, forward
from jattn.flash_attention import CudaGraphState, FlashAttentionBackend, FlashAttentionConfig
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import KVGroup, KVGroupSpec, KVPool
from jattn_kernels import reference
from jattn_kernels.spec import AttentionSpec

PAGE_SIZE, MAX_CONTEXT, NUM_PAGES, NOWHERE = 4, 22, 16, np.iinfo(np.int32).max
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 8, "sm_scale": 0.5}
LAYER = AttentionLayer(
    layer_id=1,
    tp_q_head_num=4,
    tp_k_head_num=2,
    tp_v_head_num=2,
    head_dim=16,
    v_head_dim=8,
    scaling=0.5,
    group=1,
)
BACKEND = FlashAttentionBackend(
    FlashAttentionConfig(max_context_len=MAX_CONTEXT, page_size=PAGE_SIZE, implementation="xla")
)
# Three sequences in scattered pages; the second one is padding.
SEQ_LENS = np.array([9, 0, 14], np.int32)
PAGE_TABLE = np.array([[7, 2, 11, 0, 0, 0], [0] * 6, [5, 9, 1, 14, 0, 0]], np.int32)


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make_pool(page_layout="NHD"):
    """Two groups of two layers, full of keys and values; nothing may read the first group."""
    shape = KVGroupSpec(name="x", num_layers=2, num_kv_heads=2, head_dim=16, page_layout=page_layout).page_shape

    def group(seed):
        k, v = (random(seed + i, 2, NUM_PAGES, *shape(PAGE_SIZE, width)) for i, width in enumerate((16, 8)))
        return KVGroup(k=k, v=v, name="x", page_layout=page_layout)

    return KVPool((group(0), group(2)))


def slot(row, position):
    return PAGE_TABLE[row, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def make_batch(mode, q_lens, num_tokens):
    """The last `q_lens` tokens of each sequence, padded to `num_tokens`; in decode one a row, padded or not."""
    decode = mode is ForwardMode.DECODE
    slots = []
    for row, (seq_len, q_len) in enumerate(zip(SEQ_LENS, q_lens, strict=True)):
        slots += [slot(row, p) for p in range(seq_len - q_len, seq_len)]
        slots += [NOWHERE] if decode and q_len == 0 else []
    slots += [NOWHERE] * (num_tokens - len(slots))
    ends = np.arange(1, 4) if decode else np.cumsum(q_lens)
    return ForwardBatch(
        forward_mode=mode,
        input_ids=jnp.zeros(num_tokens, jnp.int32),
        positions=jnp.zeros(num_tokens, jnp.int32),
        seq_lens=jnp.asarray(SEQ_LENS),
        cu_q_lens=jnp.asarray(np.concatenate([[0], ends]), jnp.int32),
        out_cache_loc=(jnp.full(num_tokens, NOWHERE, jnp.int32), jnp.asarray(slots, jnp.int32)),
        page_tables=(jnp.zeros_like(PAGE_TABLE), jnp.asarray(PAGE_TABLE)),
    )


DECODE = make_batch(ForwardMode.DECODE, (1, 0, 1), 3)
EXTEND = make_batch(ForwardMode.EXTEND, (3, 0, 6), 12)


@functools.partial(jax.jit, static_argnums=0)
def whole_step(backend, q, k, v, layer, batch, pool):
    return forward(backend, q, k, v, layer, batch, backend.init_forward_metadata(batch), pool)


def q_k_v(batch):
    tokens = batch.input_ids.shape[0]
    return random(10, tokens, 4, 16), random(11, tokens, 2, 16), random(12, tokens, 2, 8)


def written(pool, batch, k, v):
    """The pool's second group after layer 1's rows were written by hand."""
    group = jax.tree.map(np.array, pool.groups[1])
    for token, place in enumerate(np.asarray(batch.out_cache_loc[1])):
        if place != NOWHERE:
            page, offset = divmod(int(place), PAGE_SIZE)
            where = (1, page, offset) if group.page_layout == "NHD" else (1, page, slice(None), offset)
            group.k[where], group.v[where] = k[token], v[token]
    return group


def oracle(q, group, batch, **features):
    spec = AttentionSpec(**HEADS, **features, page_layout=group.page_layout)
    places = {"spec": spec, "layer_index": 1}
    if batch.forward_mode is ForwardMode.DECODE:
        return reference.paged_decode(q[:, None], group.k, group.v, PAGE_TABLE, SEQ_LENS, **places)[:, 0]
    return reference.paged_extend(q, group.k, group.v, PAGE_TABLE, SEQ_LENS, batch.cu_q_lens, **places)


@pytest.mark.parametrize(
    ("batch", "chunk_size", "page_layout"),
    [(DECODE, 4, "HND"), (EXTEND, 4, "NHD"), (EXTEND, None, "HND")],
    ids=["decode", "extend", "extend_without_chunks"],
)
def test_layer_of_the_second_group_writes_then_agrees_with_the_oracle(batch, chunk_size, page_layout):
    layer, pool = dataclasses.replace(LAYER, chunk_size=chunk_size), make_pool(page_layout)
    q, k, v = q_k_v(batch)
    out, new = whole_step(BACKEND, q, k, v, layer, batch, pool)
    group = written(pool, batch, k, v)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, new.groups[1]), group)
    chex.assert_trees_all_equal(new.groups[0], pool.groups[0])
    np.testing.assert_allclose(out, oracle(q, group, batch, chunk_size=chunk_size), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("batch", [DECODE, EXTEND], ids=["decode", "extend"])
@pytest.mark.parametrize("given", [True, False])
def test_attention_without_saving_leaves_the_pool_and_reads_it(batch, given):
    pool = make_pool()
    q, k, v = q_k_v(batch)
    if not given:
        k = v = None
    metadata = BACKEND.init_forward_metadata(batch)
    out, new = forward(BACKEND, q, k, v, LAYER, batch, metadata, pool, save_kv_cache=not given)
    chex.assert_trees_all_equal(new, pool)
    np.testing.assert_allclose(out, oracle(q, pool.groups[1], batch), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("missing", ["k", "v"])
@pytest.mark.parametrize("batch", [DECODE, EXTEND], ids=["decode", "extend"])
def test_attention_with_half_a_pair_is_refused(batch, missing):
    q, k, v = q_k_v(batch)
    k, v = (None, v) if missing == "k" else (k, None)
    with pytest.raises(ValueError, match=r"`k` and `v` must be given together or both be None"):
        forward(BACKEND, q, k, v, LAYER, batch, BACKEND.init_forward_metadata(batch), make_pool())


@pytest.mark.parametrize(("batch", "longest"), [(DECODE, 1), (EXTEND, 12)], ids=["decode", "extend"])
def test_metadata_bounds_are_the_buckets_not_the_batchs(batch, longest):
    metadata = BACKEND.init_forward_metadata(batch)
    assert (metadata.max_seq_len_q, metadata.max_seq_len_k) == (longest, MAX_CONTEXT)


def req_to_token():
    """Token slots of four requests: request 2 holds the first sequence, request 0 the third."""
    table = np.zeros((4, MAX_CONTEXT + 2), np.int32)
    for request, row in ((2, 0), (0, 2)):
        table[request, : SEQ_LENS[row]] = [slot(row, p) for p in range(SEQ_LENS[row])]
    return jnp.asarray(table)


def int32(*values):
    return jnp.array(values, jnp.int32)


def capture(bs, num_tokens, requests, lengths, mode=ForwardMode.DECODE):
    arguments = (bs, num_tokens, requests, lengths, None, mode, None)
    return BACKEND.init_forward_metadata_capture_cuda_graph(*arguments, req_to_token=req_to_token())


def replay(bs, req_pool_indices, seq_lens, req_to_token, forward_mode=ForwardMode.DECODE):
    arguments = (bs, req_pool_indices, seq_lens, None, None, forward_mode, None, None)
    return BACKEND.init_forward_metadata_replay_cuda_graph(*arguments, req_to_token=req_to_token)


def test_replay_has_the_tree_and_avals_of_the_capture():
    table = req_to_token()
    captured = capture(4, 4, int32(0, 0, 0, 0), int32(1, 1, 1, 1))
    for requests, lengths in (
        (int32(2, 0, 0, 0), int32(9, 14, 0, 0)),
        (int32(2, 0), int32(9, 14)),
        (int32(2, 0, 1, 1, 3, 3), int32(9, 14, 0, 0, 5, 5)),
    ):
        metadata = jax.jit(replay, static_argnums=0)(4, requests, lengths, table)
        chex.assert_trees_all_equal_structs(metadata, captured)
        chex.assert_trees_all_equal_shapes_and_dtypes(metadata, captured)


@pytest.mark.parametrize("padding", [0, 2], ids=["rows_not_given", "rows_of_length_0"])
def test_replay_reads_pages_and_slots_from_the_token_table(padding):
    requests, lengths = int32(2, 0, *[0] * padding), int32(9, 14, *[0] * padding)
    metadata = replay(4, requests, lengths, req_to_token())
    assert metadata.cache_seqlens_int32.tolist() == [9, 14, 0, 0]
    assert metadata.cu_seqlens_k.tolist() == [0, 9, 23, 23, 23]
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    (table,), (slots,) = metadata.page_tables, metadata.slots
    assert table.shape == (4, 6)
    assert table[0, :3].tolist() == [7, 2, 11]
    assert table[1, :4].tolist() == [5, 9, 1, 14]
    assert slots.tolist() == [11 * PAGE_SIZE, 14 * PAGE_SIZE + 1, NOWHERE, NOWHERE]
    assert (metadata.max_seq_len_q, metadata.max_seq_len_k) == (1, MAX_CONTEXT)


def test_replayed_token_beyond_its_page_table_is_written_nowhere():
    """Not to page 0, which belongs to nobody and must stay zero."""
    longest = 6 * PAGE_SIZE
    metadata = replay(3, int32(2, 0, 1), int32(longest, 14, longest + 1), req_to_token())
    assert metadata.slots[0].tolist() == [3, 14 * PAGE_SIZE + 1, NOWHERE]


def test_replayed_metadata_serves_a_decode_step():
    layer, pool = dataclasses.replace(LAYER, group=0), make_pool()
    pool = KVPool(pool.groups[1:])
    metadata = replay(3, int32(2, 3, 0), int32(9, 0, 14), req_to_token())
    q, k, v = q_k_v(DECODE)
    out, new = BACKEND.forward_decode(q, k, v, layer, DECODE, metadata, pool)
    group = written(KVPool((pool.groups[0], pool.groups[0])), DECODE, k, v)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, new.groups[0]), group)
    np.testing.assert_allclose(out, oracle(q, group, DECODE), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seq_lens": int32(9)}, ValueError, "`req_pool_indices` and `seq_lens` must have the same length"),
        ({"req_to_token": jnp.zeros((4, MAX_CONTEXT - 1), jnp.int32)}, ValueError, r"at least `max_context_len`=22"),
        ({"forward_mode": ForwardMode.EXTEND}, NotImplementedError, "Got forward_mode=EXTEND"),
        ({"forward_mode": ForwardMode.TARGET_VERIFY}, ValueError, "`speculative_num_draft_tokens` must be given"),
    ],
)
def test_replay_of_what_does_not_fit_is_refused(arguments, error, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it would be first to see unequal lengths
    fitting = {"req_pool_indices": int32(2, 0), "seq_lens": int32(9, 14), "req_to_token": req_to_token()}
    with pytest.raises(error, match=message):
        replay(4, **(fitting | arguments))


def test_capture_of_more_tokens_than_rows_is_refused():
    with pytest.raises(ValueError, match=r"`num_tokens` must be 2 for `bs` rows in DECODE. Got bs=2, num_tokens=4"):
        capture(2, 4, int32(0, 0), int32(1, 1))


def test_graph_state_holds_the_static_sizes():
    assert BACKEND.init_cuda_graph_state(8, 64) == CudaGraphState(max_bs=8, max_num_tokens=64, max_pages=6)
    assert BACKEND.get_cuda_graph_seq_len_fill_value() == 0


@pytest.mark.parametrize(("max_bs", "max_num_tokens"), [(0, 4), (4, 3)])
def test_graph_state_of_impossible_sizes_is_refused(max_bs, max_num_tokens):
    with pytest.raises(ValueError, match=rf"Got max_bs={max_bs}, max_num_tokens={max_num_tokens}"):
        BACKEND.init_cuda_graph_state(max_bs, max_num_tokens)


@pytest.mark.parametrize("name", ["max_context_len", "page_size"])
def test_config_of_impossible_sizes_is_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number of at least 1. Got 0"):
        FlashAttentionConfig(**({"max_context_len": 8, "page_size": 4} | {name: 0}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_cache_dtype": "int8"}, r"`kv_cache_dtype` must be auto, .*, fp8_e5m2. Got 'int8'"),
        ({"attention_arch": "GQA"}, r"`attention_arch` must be one of MHA, MLA. Got 'GQA'"),
        ({"attention_chunk_size": 6}, r"`attention_chunk_size` must be a multiple of `page_size`. .*=6, page_size=4"),
    ],
)
def test_config_of_contradictions_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        FlashAttentionConfig(max_context_len=8, page_size=4, **fields)


def test_config_says_what_the_pool_stores():
    config = FlashAttentionConfig(max_context_len=8, page_size=4, dtype="bfloat16", attention_arch="MLA")
    assert (config.stored_dtype, config.is_fp8, config.use_mla) == (jnp.bfloat16, False, True)
    config = dataclasses.replace(config, kv_cache_dtype="fp8_e5m2", disable_mla=True)
    assert (config.stored_dtype, config.is_fp8, config.use_mla) == (jnp.float8_e5m2, True, False)


def test_batch_that_says_no_pages_is_refused():
    with pytest.raises(ValueError, match="`forward_batch` must have `page_tables`, or `req_pool_indices`"):
        BACKEND.init_forward_metadata(dataclasses.replace(DECODE, page_tables=()))


def test_chunks_of_two_sizes_are_refused():
    config = dataclasses.replace(BACKEND.config, attention_chunk_size=8)
    backend, layer = FlashAttentionBackend(config), dataclasses.replace(LAYER, use_irope=True, chunk_size=4)
    with pytest.raises(ValueError, match=r"Got chunk_size=4, attention_chunk_size=8"):
        whole_step(backend, *q_k_v(DECODE), layer, DECODE, make_pool())


def test_scales_are_not_used_where_the_pool_is_not_fp8():
    q, k, v = q_k_v(DECODE)
    layer = dataclasses.replace(LAYER, k_scale=jnp.float32(2), v_scale=jnp.float32(3))
    metadata = BACKEND.init_forward_metadata(DECODE)
    chex.assert_trees_all_equal(
        forward(BACKEND, q, k, v, layer, DECODE, metadata, make_pool()),
        forward(BACKEND, q, k, v, LAYER, DECODE, metadata, make_pool()),
    )
