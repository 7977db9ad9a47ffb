"""What vLLM v0's surface refuses, what its helpers say, and the moving of blocks."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jattn.vllm import v0
from tests.jattn.test_vllm_v0 import config_of, make_batch, make_cache, make_impl, make_unpadded, q_k_v, tokens_of

Backend = v0.FlashAttentionBackend


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"blocksparse_params": {}}, NotImplementedError, "`blocksparse_params` must be None"),
        ({"head_size": 80}, ValueError, r"one of 32, 64, .* Got head_size=80"),
        ({"attn_type": "other"}, ValueError, r"`attn_type` must be one of decoder, .* Got 'other'"),
        ({"kv_cache_dtype": "int8"}, ValueError, r"`kv_cache_dtype` must be auto, a dtype or one of .* Got 'int8'"),
        ({"alibi_slopes": [1.0]}, ValueError, r"one slope a query head, 4. Got 1"),
        ({"sliding_window": 0}, ValueError, "`sliding_window` must be None, at least 1, .* Got 0"),
        ({"sliding_window": 4, "attn_type": "encoder_decoder"}, NotImplementedError, "Cross attention has no window"),
        ({"num_kv_heads": 3}, ValueError, "multiple of `num_kv_heads`"),
    ],
)
def test_layer_of_what_is_not_done_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        make_impl(**arguments)


@pytest.mark.parametrize(
    ("of_impl", "arguments", "error", "message"),
    [
        ({}, {"output_scale": jnp.ones(())}, NotImplementedError, "`output_scale` must be None"),
        ({}, {"key": None}, ValueError, "`key` and `value` must be given together"),
        ({}, {"kv_cache": None}, ValueError, "A batch with decodes must be given a cache"),
        ({"attn_type": "encoder"}, {}, ValueError, "all encoder fields"),
        ({"attn_type": "encoder_decoder"}, {}, ValueError, "all encoder and cross fields"),
    ],
)
def test_call_of_what_does_not_belong_together_is_refused(of_impl, arguments, error, message):
    metadata = make_batch(7, config_of())
    q, k, v = q_k_v(tokens_of(metadata))
    call = {"query": q, "key": k, "value": v, "kv_cache": make_cache(), "attn_metadata": metadata}
    with pytest.raises(error, match=message):
        make_impl(**of_impl).forward(v0.AttentionLayer(), **(call | arguments))


def test_too_few_queries_are_refused():
    metadata = make_batch(7, config_of(attention_chunk_size=None))
    q, k, v = q_k_v(tokens_of(metadata))
    with pytest.raises(ValueError, match="`query` must have the metadata's 51 tokens"):
        make_impl().forward(v0.AttentionLayer(), q[1:], k, v, make_cache(), metadata)


def test_backend_names_its_classes_and_shapes():
    assert Backend.get_impl_cls() is v0.FlashAttentionImpl
    assert Backend.get_metadata_cls() is v0.FlashAttentionMetadata
    assert Backend.get_builder_cls() is v0.FlashAttentionMetadataBuilder
    assert Backend.get_state_cls() is v0.CommonAttentionState
    assert Backend.get_supported_head_sizes() == [32, 64, 96, 128, 160, 192, 224, 256]
    assert Backend.get_kv_cache_shape(7, 64, 2, 32) == (2, 7, 64, 2, 32)


@pytest.mark.parametrize("block_size", [0, 1, 8, 24])
def test_cache_of_other_blocks_is_refused(block_size):
    with pytest.raises(ValueError, match=f"`block_size` must be a multiple of 16. Got .*{block_size}"):
        Backend.get_kv_cache_shape(7, block_size, 2, 32)


def test_copy_blocks_copies_in_every_cache_what_was_there_before():
    caches = [make_cache(), make_cache() + 1]
    expected = [np.array(cache) for cache in caches]
    for cache in expected:
        cache[:, [5, 1, 2]] = cache[:, [1, 2, 9]]
    new = Backend.copy_blocks(caches, np.array([[1, 5], [2, 1], [9, 2]]))
    for cache, wanted in zip(new, expected, strict=True):
        np.testing.assert_array_equal(cache, wanted)


def test_swap_blocks_goes_to_the_host_and_back():
    device, host = make_cache(), np.zeros((2, 5, 16, 2, 32), np.float32)
    original = np.array(device)
    host = Backend.swap_blocks(device, host, np.array([[3, 0], [8, 4], [1, 2]]))
    np.testing.assert_array_equal(host[:, [0, 4, 2]], original[:, [3, 8, 1]])
    assert not host[:, [1, 3]].any()
    device = Backend.swap_blocks(host, device, np.array([[4, 20]]))
    original[:, 20] = original[:, 8]
    np.testing.assert_array_equal(device, original)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[1, 99]], r"`src_to_dists` must have as every destination a block in 0 .. 23. Got \[99\]"),
        ([[-1, 2]], r"`src_to_dists` must have as every source a block in 0 .. 23. Got \[-1\]"),
        ([[1, 2, 3]], r"must be pairs of blocks \[n, 2\]. Got src_to_dists.shape=\(1, 3\)"),
    ],
)
def test_blocks_that_are_not_there_are_refused(pairs, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it would be first to see the shape
    with pytest.raises(ValueError, match=message):
        Backend.copy_blocks([make_cache()], np.array(pairs))


@pytest.mark.parametrize(("attn_type", "causal"), [("decoder", True), ("encoder", False), ("encoder_decoder", False)])
def test_only_the_decoder_is_causal(attn_type, causal):
    assert v0._get_causal_option(attn_type) is causal


def test_sequence_metadata_is_that_of_the_type():
    config = config_of(max_encoder_len=24, num_encoder_tokens=60)
    metadata = make_batch(11, config, encoder=True)
    query, key, encoder = metadata.query_start_loc, metadata.seq_start_loc, metadata.encoder_seq_start_loc
    for attn_type, expected in (
        ("decoder", (query, 40, key, 40)),
        ("encoder_only", (query, 40, key, 40)),
        ("encoder_decoder", (query, 40, encoder, 24)),
        ("encoder", (encoder, 24, encoder, 24)),
    ):
        got = v0._get_query_key_seq_metadata(metadata, True, attn_type)
        assert all(x is y or x == y for x, y in zip(got, expected, strict=True))
    with pytest.raises(AttributeError, match=r"`attn_type` must be one of decoder, .* Got 'other'"):
        v0._get_query_key_seq_metadata(metadata, True, "other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_lens": [0, 1]}, "must be `context_lens` \\+ `query_lens`"),
        ({"block_tables": {4: [3], 9: [7]}}, "must hold 20 tokens. Got 1 blocks"),
        ({"encoder_seq_len": 3}, "within `max_encoder_len`=None"),
    ],
)
def test_sequences_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_unpadded(config_of(), **changes)


def test_batches_that_do_not_fit_their_bucket_are_refused():
    with pytest.raises(ValueError, match=r"the bucket's `num_prefills`=1. Got 2"):
        make_batch(7, config_of(num_prefills=1))
    builder = v0.FlashAttentionMetadataBuilder(config_of())
    with pytest.raises(ValueError, match=r"`batch_size` must be 0 tokens and 2 padded ones. Got batch_size=3"):
        builder.build([], [], 2, 3)
    with pytest.raises(ValueError, match="those of the rows added, then of padding"):
        builder.build([4], [1], -1, 0)


def test_prefills_after_decodes_are_refused():
    builder = v0.FlashAttentionMetadataBuilder(config_of())
    facts = {"seq_ids": [1], "seq_lens": [5], "query_lens": [1], "context_lens": [4], "block_tables": {1: [2]}}
    builder._add_seq_group(v0.InterDataForSeqGroup(is_prompt=False, **facts), False, False)
    with pytest.raises(ValueError, match="must be added before those of decodes"):
        builder._add_seq_group(v0.InterDataForSeqGroup(is_prompt=True, **facts), False, False)


def test_profile_run_has_no_slots():
    config = config_of(num_prefills=None, num_prefill_tokens=None)
    assert set(make_unpadded(config, block_tables=None).slot_mapping.tolist()) == {-1}
