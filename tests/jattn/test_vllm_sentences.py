"""What vLLM's two surfaces say of what a user hands over and they cannot use."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.vllm import v0, v1
from jattn.vllm import v1_flash_attention as flash
from tests.jattn.test_vllm_v0 import config_of, make_batch, make_cache, make_impl, q_k_v, tokens_of
from tests.jattn.test_vllm_v1_flash_attention import DECODES, make_common
from tests.jattn.test_vllm_v1_flash_attention import make_impl as make_impl_v1

pytestmark = pytest.mark.usefixtures("unchecked")
Backend = v0.FlashAttentionBackend
CACHE = make_cache()  # of calls that are refused, which donate nothing


def refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_heads": 3}, "`num_heads` must be a multiple of `num_kv_heads`. Got num_heads=3, num_kv_heads=2"),
        ({"num_heads": "x"}, "`num_heads` must be a whole number of at least 1. Got 'x'"),
        ({"num_kv_heads": 0}, "`num_kv_heads` must be a whole number"),
        ({"head_size": 32.0}, "`head_size` must be a whole number"),
        ({"scale": None}, "`scale` must be a finite number, known outside jit. Got None"),
        ({"logits_soft_cap": "x"}, "`logits_soft_cap` must be a finite number"),
        ({"alibi_slopes": 5}, "`alibi_slopes` must have one slope a query head, 4. Got 5"),
        ({"alibi_slopes": ["a"] * 4}, "`alibi_slopes` must be a finite number"),
        ({"sliding_window": "x"}, "`sliding_window` must be None, at least 1, .* Got 'x'"),
        ({"sliding_window": (3,)}, r"`sliding_window` must be None, .* Got sliding_window=\(3,\)"),
        ({"sliding_window": ("a", 0)}, "`sliding_window` must be None, .* Got 'a'"),
        ({"kv_cache_dtype": ["fp8"]}, "`kv_cache_dtype` must be auto, a dtype or one of float32,"),
        ({"kv_cache_dtype": "fp8_inc"}, "`kv_cache_dtype` must be auto, a dtype or one of float32,"),
        ({"kv_sharing_target_layer_name": 5}, "`kv_sharing_target_layer_name` must be of type str"),
    ],
)
def test_impl_says_what_it_cannot_use(changes, sentence):
    refused(lambda: make_impl(**changes), sentence)


@pytest.mark.parametrize("name", ["fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"])
def test_impl_takes_the_names_of_fp8(name):
    metadata = make_batch(7, config_of())
    call = (v0.AttentionLayer(_k_scale=2.0), *q_k_v(tokens_of(metadata)))
    impl = make_impl(kv_cache_dtype=name)
    refused(lambda: impl.forward(*call, make_cache(), metadata), f"`kv_cache` must be float8_e4m3fn for .*{name!r}")
    _, cache = impl.forward(*call, make_cache(dtype=jnp.float8_e4m3fn), metadata)
    assert cache.dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((-1, 16, 2, 32), "`num_blocks` must be a whole number of at least 1. Got -1"),
        ((7, "x", 2, 32), "`block_size` must be a multiple of 16. Got 'x'"),
        ((7, 16, 0, 32), "`num_kv_heads` must be a whole number of at least 1. Got 0"),
        ((7, 16, 2, 80), "`head_size` must be one of 32, 64, .* Got 80"),
        ((7, 16, 2, None), "`head_size` must be a whole number"),
    ],
)
def test_cache_of_impossible_sizes_is_refused(sizes, sentence):
    refused(lambda: Backend.get_kv_cache_shape(*sizes), sentence)


@pytest.mark.parametrize(
    ("caches", "pairs", "sentence"),
    [
        ([CACHE], [[1.5, 2]], r"`src_to_dists` must be integers \[n, 2\]"),
        ([CACHE], {1: 2}, r"`src_to_dists` must be integers \[n, 2\]"),
        ([CACHE], None, r"`src_to_dists` must be integers \[n, 2\]"),
        ([None], [[1, 2]], r"`kv_caches\[0\]` must be an array \[2, num_blocks"),
        (None, [[1, 2]], "`kv_caches` must be a list with the cache of each layer"),
        ([CACHE, CACHE[:, :3]], [[1, 3]], r"a block in 0 .. 2. Got \[3\]"),
    ],
)
def test_copy_blocks_says_what_it_cannot_use(caches, pairs, sentence):
    refused(lambda: Backend.copy_blocks(caches, pairs), sentence)


def test_no_pairs_of_blocks_move_nothing():
    cache, host = make_cache(), np.zeros((2, 5, 16, 2, 32), np.float32)
    assert Backend.copy_blocks([], []) == []
    chex.assert_trees_all_equal(Backend.copy_blocks([make_cache()], []), [cache])
    assert not Backend.swap_blocks(cache, host, []).any()


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        (None, r"`dst_kv_cache` must be an array \[2, num_blocks"),
        (np.zeros((2, 5, 8, 2, 32), np.float32), "must have blocks of one shape and dtype"),
        (np.zeros((2, 5, 16, 2, 32), np.float16), "must have blocks of one shape and dtype"),
    ],
)
def test_swap_blocks_of_other_caches_is_refused(host, sentence):
    refused(lambda: Backend.swap_blocks(make_cache(), host, [[0, 1]]), sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"query": None}, r"`query` must be an array \[num_tokens, num_heads, head_size\]"),
        ({"query": jnp.ones((51, 128))}, r"`query` must be an array .* Got query.shape=\(51, 128\)"),
        ({"query": jnp.ones((51, 3, 32))}, r"`query` must be \[num_tokens, 4, 32\]"),
        ({"query": jnp.ones((51, 4, 32), "bfloat16")}, "`query` and `kv_cache` must have one dtype"),
        ({"key": [1]}, r"`key` must be an array \[num_tokens, num_kv_heads, head_size\]"),
        ({"key": jnp.ones((50, 2, 32))}, r"`key` must have a row for each of 51 slots. Got key.shape=\(50"),
        ({"value": jnp.ones((51, 1, 32))}, r"`value` must be \[T, 2, 32\] as the pages are"),
        ({"kv_cache": (1, 2)}, "`kv_cache` must be an array"),
        ({"kv_cache": jnp.zeros((24, 2, 16, 2, 32))}, r"`kv_cache` of a combined pool must be \[2, P"),
        ({"attn_metadata": None}, "`attn_metadata` must be of type FlashAttentionMetadata"),
        ({"layer": None}, "`layer` must have `_q_scale`, `_k_scale`, `_v_scale`. Got layer=None"),
        ({"layer": v0.AttentionLayer(_k_scale="x")}, "`layer._k_scale` must be None, a number"),
    ],
)
def test_v0_call_says_what_it_cannot_use(arguments, sentence):
    metadata = make_batch(7, config_of())
    q, k, v = q_k_v(tokens_of(metadata))
    call = {"layer": v0.AttentionLayer(), "query": q, "key": k, "value": v, "kv_cache": make_cache()}
    refused(lambda: make_impl().forward(**(call | {"attn_metadata": metadata} | arguments)), sentence)


@pytest.mark.parametrize(
    ("attn_type", "field"), [("decoder", "block_tables"), ("encoder_decoder", "cross_block_tables")]
)
def test_v0_call_names_the_metadata_of_its_attention_type(attn_type, field):
    """What lacks a row is told by the field that it is in; so is what is no array of integers."""
    metadata = make_batch(11, config_of(max_encoder_len=24, num_encoder_tokens=60), encoder=True)
    q, k, v = q_k_v(tokens_of(metadata), metadata.num_encoder_tokens if attn_type == "encoder_decoder" else None)
    impl, given = make_impl(attn_type=attn_type), getattr(metadata, field)
    for wrong, rule in ((given[:-1], "int32"), (given.astype(jnp.float32), "integers"), ([1], "integers")):
        changed = dataclasses.replace(metadata, **{field: wrong})
        refused(lambda: impl.forward(v0.AttentionLayer(), q, k, v, CACHE, changed), f"`{field}` must be {rule}")  # noqa: B023


def test_keys_that_are_not_the_tokens_are_refused_without_a_cache():
    metadata = make_batch(7, config_of(), decodes=0, pad=0)
    q, k, v = q_k_v(tokens_of(metadata))
    call = (v0.AttentionLayer(), q, k[1:], v[1:], None, metadata)
    refused(lambda: make_impl().forward(*call), f"`key` must have a row for each of {len(k)} tokens")


def test_v1_builder_takes_integers_of_any_kind_and_says_what_it_cannot_use():
    builder = flash.FlashAttentionMetadataBuilder(flash.KVCacheSpec(16), v1.VllmConfig({}))
    common = make_common(*DECODES)
    other = dataclasses.replace(common, seq_lens=np.asarray(common.seq_lens).astype(np.int64))
    chex.assert_trees_all_equal(builder.build(0, other), builder.build(0, common))
    for field in ("seq_lens", "query_start_loc", "block_table_tensor", "slot_mapping"):
        changed = dataclasses.replace(common, **{field: None})
        refused(lambda: builder.build(0, changed), f"`{field}` must be integers .* Got {field}=None")  # noqa: B023


@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("field", ["query_start_loc", "seq_lens", "block_table_tensor", "num_reqs"])
def test_v1_builder_refuses_rows_that_do_not_belong_together(field, chunk_size):
    builder = flash.FlashAttentionMetadataBuilder(flash.KVCacheSpec(16), v1.VllmConfig({}, chunk_size))
    common = make_common(*DECODES)
    value = getattr(common, field)
    changed = dataclasses.replace(common, **{field: value + 1 if field == "num_reqs" else value[:-1]})
    refused(lambda: builder.build(0, changed), "`query_start_loc` must have an entry more than `num_reqs`")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"query": jnp.ones((3, 128))}, r"`query` must be an array \[num_tokens, num_heads, head_size\]"),
        ({"attn_metadata": 5}, "`attn_metadata` must be of type FlashAttentionMetadata"),
        ({"kv_cache": jnp.ones((2, 16, 16, 2))}, r"`kv_cache` must be an array \[2, num_blocks"),
        ({"block_table": jnp.zeros(3, jnp.int32)}, r"`seq_lens` must be \[B\] and `block_table` \[B, max_pages\]"),
    ],
)
def test_v1_call_says_what_it_cannot_use(arguments, sentence):
    builder = flash.FlashAttentionMetadataBuilder(flash.KVCacheSpec(16), v1.VllmConfig({}))
    metadata = builder.build(0, make_common(*DECODES))
    if "block_table" in arguments:
        arguments = {"attn_metadata": dataclasses.replace(metadata, **arguments)}
    q, k, v = q_k_v(3)
    call = {"query": q, "key": k, "value": v, "kv_cache": make_cache(), "attn_metadata": metadata}
    refused(lambda: make_impl_v1().forward(v0.AttentionLayer(), **(call | arguments)), sentence)


def added(**changes):
    builder = v0.FlashAttentionMetadataBuilder(config_of(num_prefills=None, num_prefill_tokens=None))
    group = {"seq_ids": [0], "seq_lens": [5], "query_lens": [5], "context_lens": [0], "block_tables": {0: [3]}}
    builder._add_seq_group(v0.InterDataForSeqGroup(is_prompt=True, **(group | changes)), False, False)
    return builder


TABLE = np.arange(10, dtype=np.int32)[None]
BATCH = v1.InputBatch(["a", "b"])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: added(seq_lens=[5.5]), r"`seq_lens` must be integers \[n\]"),
        (
            lambda: added(seq_lens=[5, 6]),
            "`seq_ids`, `seq_lens`, .* must have an entry for each sequence. Got 1, 2, 1, 1",
        ),
        (lambda: added(block_tables={1: [3]}), r"`block_tables` must have its blocks. Got those of \[1\]"),
        (lambda: added(block_tables={0: [1.5]}), r"`block_tables` must be integers \[n\]"),
        (lambda: added(encoder_seq_len=None), "`encoder_seq_len` must be a whole number"),
        (lambda: added().build([5], [5], "x", 5), "`cuda_graph_pad_size` must be a whole number of at least -1"),
        (lambda: added().build([5, 6], [5], -1, 5), "`seq_lens` and `query_lens` must have one length. Got 2 and 1"),
        (lambda: added()._get_graph_runner_block_tables(0, [[1]]), "`num_seqs` must be at least the 1 `block_tables`"),
        (lambda: v0.FlashAttentionMetadataBuilder(None), "`input_builder` must be of type InputBuilder"),
        (lambda: v0.InputBuilder(block_size="x", max_model_len=4), "`block_size` must be a whole number"),
        (lambda: v0.CommonAttentionState(None), "`runner` must be of type InputBuilder"),
        (lambda: flash.KVCacheSpec(0), "`block_size` must be a whole number of at least 1. Got 0"),
        (lambda: v1.VllmConfig(None), "`attention_layers` must be of type Mapping"),
        (lambda: v1.get_per_layer_parameters(None, object), "`vllm_config` must have `attention_layers`. Got"),
        (lambda: flash.FlashAttentionMetadataBuilder(None, None), "`kv_cache_spec` must have `block_size`. Got"),
        (lambda: v1.reorder_batch_to_split_decodes_and_prefills(None, None), "`input_batch` must have `req_ids`"),
        (
            lambda: v1.get_per_layer_parameters(v1.VllmConfig({"a": 5}), object),
            r"`attention_layers\['a'\]` must have `sliding_window`, `logits_soft_cap`, `scale`. Got",
        ),
        (lambda: v1.infer_global_hyperparameters(None), "`per_layer_params` must be of type dict"),
        (
            lambda: v1.reorder_batch_to_split_decodes_and_prefills(BATCH, v1.SchedulerOutput({"a": 1})),
            r"`scheduler_output` must have tokens for every request. Got none for \['b'\]",
        ),
        (lambda: v1.split_decodes_and_prefills(None), "`common_attn_metadata` must be of type CommonAttentionMetadata"),
        (
            lambda: v1.make_local_attention_virtual_batches(5, [0, 4], [6], TABLE, 2),
            "`attn_chunk_size` must be a positive multiple of a positive `block_size`. Got .*, block_size=2",
        ),
        (
            lambda: v1.make_local_attention_virtual_batches(4, [0, 4.5], [6], TABLE, 2),
            "`query_start_loc_np` must be int",
        ),
        (
            lambda: v1.make_local_attention_virtual_batches(4, [0, 4], [6, 7], TABLE, 2),
            "`seq_lens_np`, and `block_table`",
        ),
    ],
)
def test_builders_and_utilities_say_what_they_cannot_use(call, sentence):
    refused(call, sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model_input": None}, "`model_input` must be of type ModelInput"),
        ({"sampled_token_ids": [1, 2]}, "`sampled_token_ids` must be an array"),
        ({"block_size": 1.5}, "`block_size` must be a whole number"),
        ({"num_queries": None}, "`num_queries` must be a whole number"),
    ],
)
def test_advance_step_says_what_it_cannot_use(arguments, sentence):
    metadata = make_batch(3, config_of(), prefills=0, decodes=2, pad=1)
    tokens = jnp.zeros(3, jnp.int32)
    call = {"model_input": v0.ModelInput(tokens, tokens), "sampled_token_ids": None, "block_size": 16}
    refused(lambda: metadata.advance_step(**(call | {"num_seqs": 3, "num_queries": 2} | arguments)), sentence)
