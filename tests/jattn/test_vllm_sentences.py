"""What vLLM's two surfaces refuse of what a user hands over: the argument is named."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.vllm import v0, v1
from jattn.vllm import v1_flash_attention as flash
from tests.jattn.harness.refusals import refused
from tests.jattn.test_vllm_v0 import config_of, make_batch, make_cache, make_impl, q_k_v, tokens_of
from tests.jattn.test_vllm_v1_flash_attention import DECODES, make_common
from tests.jattn.test_vllm_v1_flash_attention import make_impl as make_impl_v1

pytestmark = pytest.mark.usefixtures("unchecked")
Backend = v0.FlashAttentionBackend
CACHE = make_cache()  # of calls that are refused, which donate nothing


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 3),
        ("head_size", 32.0),
        ("scale", None),
        ("alibi_slopes", 5),
        ("alibi_slopes", ["a"] * 4),
        ("sliding_window", "x"),
        ("sliding_window", (3,)),
        ("sliding_window", ("a", 0)),
        ("kv_cache_dtype", "fp8_inc"),
        ("kv_sharing_target_layer_name", 5),
    ],
)
def test_impl_names_what_it_cannot_use(field, value):
    refused(lambda: make_impl(**{field: value}), field)


@pytest.mark.parametrize("name", ["fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"])
def test_impl_takes_the_names_of_fp8(name):
    metadata = make_batch(7, config_of())
    call = (v0.AttentionLayer(_k_scale=2.0), *q_k_v(tokens_of(metadata)))
    impl = make_impl(kv_cache_dtype=name)
    refused(lambda: impl.forward(*call, CACHE, metadata), "kv_cache")
    _, cache = impl.forward(*call, make_cache(dtype=jnp.float8_e4m3fn), metadata)
    assert cache.dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("sizes", "argument"),
    [
        ((-1, 16, 2, 32), "num_blocks"),
        ((7, "x", 2, 32), "block_size"),
        ((7, 16, 0, 32), "num_kv_heads"),
        ((7, 16, 2, 80), "head_size"),
    ],
)
def test_cache_of_impossible_sizes_is_refused(sizes, argument):
    refused(lambda: Backend.get_kv_cache_shape(*sizes), argument)


def test_no_pairs_of_blocks_move_nothing():
    cache, host = make_cache(), np.zeros((2, 5, 16, 2, 32), np.float32)
    assert Backend.copy_blocks([], []) == []
    chex.assert_trees_all_equal(Backend.copy_blocks([make_cache()], []), [cache])
    assert not Backend.swap_blocks(cache, host, []).any()


SMALL = np.zeros((2, 5, 8, 2, 32), np.float32)
HALVES = np.zeros((2, 5, 16, 2, 32), np.float16)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: Backend.copy_blocks([CACHE], [[1.5, 2]]), "src_to_dists"),
        (lambda: Backend.copy_blocks([CACHE, CACHE[:, :3]], [[1, 3]]), "src_to_dists"),
        (lambda: Backend.copy_blocks([None], [[1, 2]]), "kv_caches[0]"),
        (lambda: Backend.copy_blocks(None, [[1, 2]]), "kv_caches"),
        (lambda: Backend.swap_blocks(CACHE, None, [[0, 1]]), "dst_kv_cache"),
        (lambda: Backend.swap_blocks(CACHE, SMALL, [[0, 1]]), "src_kv_cache"),
        (lambda: Backend.swap_blocks(CACHE, HALVES, [[0, 1]]), "src_kv_cache"),
    ],
)
def test_blocks_that_cannot_move_are_refused(call, argument):
    refused(call, argument)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"query": None}, "query"),
        ({"query": jnp.ones((51, 4, 32), "bfloat16")}, "query"),
        ({"key": [1]}, "key"),
        ({"key": jnp.ones((50, 2, 32))}, "key"),
        ({"value": jnp.ones((51, 1, 32))}, "value"),
        ({"kv_cache": (1, 2)}, "kv_cache"),
        ({"kv_cache": jnp.zeros((24, 2, 16, 2, 32))}, "kv_cache"),
        ({"attn_metadata": None}, "attn_metadata"),
        ({"layer": None}, "layer"),
    ],
)
def test_v0_call_names_what_it_cannot_use(arguments, argument):
    metadata = make_batch(7, config_of())
    q, k, v = q_k_v(tokens_of(metadata))
    call = {"layer": v0.AttentionLayer(), "query": q, "key": k, "value": v, "kv_cache": make_cache()}
    refused(lambda: make_impl().forward(**(call | {"attn_metadata": metadata} | arguments)), argument)


@pytest.mark.parametrize(
    ("attn_type", "field"), [("decoder", "block_tables"), ("encoder_decoder", "cross_block_tables")]
)
def test_v0_call_names_the_metadata_of_its_attention_type(attn_type, field):
    """What lacks a row is told by the field that it is in."""
    metadata = make_batch(11, config_of(max_encoder_len=24, num_encoder_tokens=60), encoder=True)
    q, k, v = q_k_v(tokens_of(metadata), metadata.num_encoder_tokens if attn_type == "encoder_decoder" else None)
    impl, given = make_impl(attn_type=attn_type), getattr(metadata, field)
    changed = dataclasses.replace(metadata, **{field: given[:-1]})
    refused(lambda: impl.forward(v0.AttentionLayer(), q, k, v, make_cache(), changed), field)


def test_keys_that_are_not_the_tokens_are_refused_without_a_cache():
    metadata = make_batch(7, config_of(), decodes=0, pad=0)
    q, k, v = q_k_v(tokens_of(metadata))
    refused(lambda: make_impl().forward(v0.AttentionLayer(), q, k[1:], v[1:], None, metadata), "key")


V1_BUILDER = flash.FlashAttentionMetadataBuilder(flash.KVCacheSpec(16), v1.VllmConfig({}))


def test_v1_builder_takes_integers_of_any_kind():
    common = make_common(*DECODES)
    other = dataclasses.replace(common, seq_lens=np.asarray(common.seq_lens).astype(np.int64))
    chex.assert_trees_all_equal(V1_BUILDER.build(0, other), V1_BUILDER.build(0, common))


@pytest.mark.parametrize("field", ["seq_lens", "query_start_loc", "block_table_tensor", "slot_mapping"])
def test_v1_builder_names_what_is_no_array_of_integers(field):
    changed = dataclasses.replace(make_common(*DECODES), **{field: None})
    refused(lambda: V1_BUILDER.build(0, changed), field)


@pytest.mark.parametrize("field", ["query_start_loc", "seq_lens", "block_table_tensor", "num_reqs"])
def test_v1_builder_refuses_rows_that_do_not_belong_together(field):
    common = make_common(*DECODES)
    value = getattr(common, field)
    changed = dataclasses.replace(common, **{field: value + 1 if field == "num_reqs" else value[:-1]})
    refused(lambda: V1_BUILDER.build(0, changed), "query_start_loc")


def test_v1_call_names_metadata_that_it_cannot_use():
    metadata = V1_BUILDER.build(0, make_common(*DECODES))
    call = (v0.AttentionLayer(), *q_k_v(3), make_cache())
    refused(lambda: make_impl_v1().forward(*call, 5), "attn_metadata")
    flat = dataclasses.replace(metadata, block_table=jnp.zeros(3, jnp.int32))
    refused(lambda: make_impl_v1().forward(*call, flat), "seq_lens")


def added(**changes):
    builder = v0.FlashAttentionMetadataBuilder(config_of(num_prefills=None, num_prefill_tokens=None))
    group = {"seq_ids": [0], "seq_lens": [5], "query_lens": [5], "context_lens": [0], "block_tables": {0: [3]}}
    builder._add_seq_group(v0.InterDataForSeqGroup(is_prompt=True, **(group | changes)), False, False)
    return builder


TABLE = np.arange(10, dtype=np.int32)[None]
BATCH = v1.InputBatch(["a", "b"])
local = v1.make_local_attention_virtual_batches
reorder = v1.reorder_batch_to_split_decodes_and_prefills


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: added(seq_lens=[5.5]), "seq_lens"),
        (lambda: added(seq_lens=[5, 6]), "seq_ids"),
        (lambda: added(block_tables={1: [3]}), "block_tables"),
        (lambda: added(block_tables={0: [1.5]}), "block_tables"),
        (lambda: added(encoder_seq_len=None), "encoder_seq_len"),
        (lambda: added().build([5], [5], "x", 5), "cuda_graph_pad_size"),
        (lambda: added().build([5, 1], [5], 1, 5), "seq_lens"),
        (lambda: added()._get_graph_runner_block_tables(0, [[1]]), "num_seqs"),
        (lambda: v0.FlashAttentionMetadataBuilder(None), "input_builder"),
        (lambda: v0.InputBuilder(block_size="x", max_model_len=4), "block_size"),
        (lambda: v0.CommonAttentionState(None), "runner"),
        (lambda: flash.KVCacheSpec(0), "block_size"),
        (lambda: flash.FlashAttentionMetadataBuilder(None, None), "kv_cache_spec"),
        (lambda: v1.VllmConfig(None), "attention_layers"),
        (lambda: v1.get_per_layer_parameters(None, object), "vllm_config"),
        (lambda: v1.get_per_layer_parameters(v1.VllmConfig({"a": 5}), object), "attention_layers['a']"),
        (lambda: v1.infer_global_hyperparameters(5), "per_layer_params"),
        (lambda: v1.split_decodes_and_prefills(None), "common_attn_metadata"),
        (lambda: reorder(None, None), "input_batch"),
        (lambda: reorder(BATCH, v1.SchedulerOutput({"a": 1})), "scheduler_output"),
        (lambda: local(5, [0, 4], [6], TABLE, 2), "attn_chunk_size"),
        (lambda: local(4, [0, 4.5], [6], TABLE, 2), "query_start_loc_np"),
        (lambda: local(4, [0, 4], [6, 7], TABLE, 2), "query_start_loc_np"),
    ],
)
def test_builders_and_utilities_name_what_they_cannot_use(call, argument):
    refused(call, argument)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("model_input", None), ("sampled_token_ids", [1, 2]), ("block_size", 1.5), ("num_queries", None)],
)
def test_advance_step_names_what_it_cannot_use(argument, value):
    metadata = make_batch(3, config_of(), prefills=0, decodes=2, pad=1)
    tokens = jnp.zeros(3, jnp.int32)
    call = {"model_input": v0.ModelInput(tokens, tokens), "sampled_token_ids": None, "block_size": 16}
    refused(lambda: metadata.advance_step(**(call | {"num_seqs": 3, "num_queries": 2, argument: value})), argument)
