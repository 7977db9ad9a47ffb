"""What SGLang's and pymllm's backends and the pool say of what a user hands over and they cannot use."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.backend import AttentionLayer, forward, forward_rotary
from jattn.flash_attention import (
    FlashAttentionBackend,
    FlashAttentionConfig,
    FlashAttentionMultiStepBackend,
    cdiv,
)
from jattn.flashinfer import FlashInferAttnBackend, KVBuffers
from jattn.forward_batch import ForwardBatch, ForwardMode, HostBatch, ReqToTokenPool
from jattn.kv_pool import KVGroupSpec, KVPool, make_pool
from jattn.spec_info import EagleVerifyInput

pytestmark = pytest.mark.usefixtures("unchecked")

CONFIG = FlashAttentionConfig(max_context_len=32, page_size=4)
HEADS = {"tp_q_head_num": 4, "tp_k_head_num": 2, "tp_v_head_num": 2, "head_dim": 8, "v_head_dim": 8, "scaling": 0.3}
LAYER = AttentionLayer(layer_id=0, **HEADS)
GROUP = KVGroupSpec(name="layers", num_layers=2, num_kv_heads=2, head_dim=8)
POOL = make_pool((GROUP,), num_pages=5, page_size=4, dtype="float32")
Q, K = jnp.ones((2, 4, 8)), jnp.ones((2, 2, 8))
NO_SLOTS = jnp.zeros((4, 32), jnp.int32)


def int32(*values):
    return jnp.array(values, jnp.int32)


BATCH = ForwardBatch(
    forward_mode=ForwardMode.DECODE,
    input_ids=int32(1, 2),
    positions=int32(4, 2),
    seq_lens=int32(5, 3),
    cu_q_lens=int32(0, 1, 2),
    out_cache_loc=(int32(8, 14),),
    page_tables=(jnp.array([[1, 2], [3, 0]], jnp.int32),),
)
PYMLLM = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "kv_cache_dtype": "auto",
    "q_dtype": "float32",
    "max_context_len": 32,
    "req_to_token": (4, 32),
    "device": None,
    "max_req_pool_size": 4,
    "page_size": 4,
}
BACKENDS = [FlashAttentionBackend(CONFIG), FlashInferAttnBackend(**PYMLLM)]


def refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_context_len": "x"}, "`max_context_len` must be a whole number of at least 1. Got 'x'"),
        ({"page_size": 2.5}, "`page_size` must be a whole number"),
        ({"attention_chunk_size": "x"}, "`attention_chunk_size` must be None or a whole number"),
        ({"sliding_window_size": "x"}, "`sliding_window_size` must be None or a whole number of at least -1"),
        ({"dtype": "int8"}, "`dtype` must be a dtype or one of float32,"),
        ({"kv_cache_dtype": ["fp8"]}, "`kv_cache_dtype` must be auto, a dtype or one of float32,"),
        ({"layers": 5}, "`layers` must be of type tuple or list"),
        ({"layers": (5,)}, "`layers` must be of type AttentionLayer"),
        ({"implementation": 5}, "`implementation` must be of type str"),
    ],
)
def test_config_says_what_it_cannot_use(fields, sentence):
    refused(lambda: dataclasses.replace(CONFIG, **fields), sentence)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tp_q_head_num": 3}, "`tp_q_head_num` must be a multiple of `tp_k_head_num`"),
        ({"tp_k_head_num": 0}, "`tp_k_head_num` must be a whole number of at least 1"),
        ({"scaling": None}, "`scaling` must be a finite number"),
        ({"logit_cap": -1.0}, r"`logit_cap` must be at least 0 \(off\)"),
        ({"sliding_window_size": None}, "`sliding_window_size` must be a whole number of at least -1"),
        ({"group": "x"}, "`group` must be a whole number"),
    ],
)
def test_layer_says_what_it_cannot_be(fields, sentence):
    refused(lambda: dataclasses.replace(LAYER, **fields), sentence)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kv_cache_dtype": "int8"}, "`kv_cache_dtype` must be auto, a dtype or one of float32,"),
        ({"q_dtype": "x"}, "`q_dtype` must be a dtype or one of float32,"),
        ({"num_heads": 3}, "`num_heads` must be a multiple of `num_kv_heads`. Got num_heads=3, num_kv_heads=2"),
        ({"req_to_token": None}, "`req_to_token` must be the table of token slots, or its shape. Got None"),
        ({"req_to_token": 5}, "`req_to_token` must be an array of 2 axes, or its shape. Got req_to_token=5"),
        ({"kv_indptr_buf": 5}, "`kv_indptr_buf` must be an array of 1 axis, or its shape"),
        ({"sliding_window_size": 1.5}, "`sliding_window_size` must be None or a whole number of at least 0"),
        ({"max_req_pool_size": None}, "`max_req_pool_size` must be a whole number"),
    ],
)
def test_pymllm_backend_says_what_it_cannot_use(fields, sentence):
    refused(lambda: FlashInferAttnBackend(**(PYMLLM | fields)), sentence)


@pytest.mark.parametrize("name", ["fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"])
def test_backends_take_the_names_of_fp8(name):
    assert dataclasses.replace(CONFIG, kv_cache_dtype=name, dtype="torch.bfloat16").is_fp8
    assert FlashInferAttnBackend(**(PYMLLM | {"kv_cache_dtype": name})).kv_cache_dtype == jnp.float8_e4m3fn
    assert FlashInferAttnBackend(**PYMLLM).kv_cache_dtype == jnp.float32


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"forward_mode": "DECODE"}, "`forward_mode` must be of type ForwardMode. Got forward_mode='DECODE'"),
        ({"input_ids": None}, r"`input_ids` must be integers \[tokens\]"),
        ({"seq_lens": None}, r"`seq_lens` must be integers \[batch_size\]"),
        ({"seq_lens": jnp.array([5.0, 3.0])}, "`seq_lens` must be integers .* Got .*float32"),
        ({"page_tables": BATCH.page_tables[0]}, "`page_tables` must be a tuple of arrays"),
        ({"page_tables": (BATCH.page_tables[0][:1],)}, "`page_tables` must have a row for each of 2 `seq_lens`"),
        ({"encoder_lens": int32(4)}, r"`encoder_lens` must have a row for each of 2 `seq_lens`. Got a shape of \(1,\)"),
        ({"req_pool_indices": int32(0)}, "`req_pool_indices` must have a row for each of 2 `seq_lens`"),
        ({"encoder_page_table": BATCH.page_tables[0][:1]}, "`encoder_page_table` must have a row for each of 2"),
        ({"out_cache_loc": 5}, "`out_cache_loc` must be a tuple of arrays"),
        ({"out_cache_loc": BATCH.out_cache_loc * 2}, "must have one entry for each group of the pool. Got 1 and 2"),
        ({"encoder_lens": [1.5, 2]}, r"`encoder_lens` must be integers \[batch_size\]"),
        ({"out_cache_loc": ()}, "`out_cache_loc` must have the slots of each group"),
        ({"forward_mode": ForwardMode.EXTEND, "cu_q_lens": None}, r"`cu_q_lens` must be integers \[batch_size \+ 1\]"),
        ({"forward_mode": ForwardMode.EXTEND, "cu_q_lens": int32(0, 1)}, "`cu_q_lens` must have an entry more"),
        ({"spec_info": 5}, "`spec_info` must be of type EagleDraftInput or EagleVerifyInput or None"),
        ({"page_tables": (), "req_pool_indices": int32(0, 1)}, "`forward_batch` must have `page_tables`, or"),
        (
            {"page_tables": (), "req_pool_indices": int32(0, 1), "req_to_token_pool": ReqToTokenPool(None)},
            r"`req_to_token` must be integers \[requests, slots\]. Got req_to_token=None",
        ),
        (
            {"page_tables": (), "req_pool_indices": int32(0, 1), "req_to_token_pool": NO_SLOTS},
            "`req_to_token_pool` must be of type ReqToTokenPool or None",
        ),
    ],
)
def test_backends_say_what_no_batch_is(backend, fields, sentence):
    refused(lambda: backend.init_forward_metadata(dataclasses.replace(BATCH, **fields)), sentence)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"bs": "x"}, "`bs` must be a whole number"),
        ({"forward_mode": None}, "`forward_mode` must be of type ForwardMode"),
        ({"req_pool_indices": None}, r"`req_pool_indices` must be integers \[rows\]"),
        ({"seq_lens": [1.5, 1]}, r"`seq_lens` must be integers \[rows\]"),
        ({"req_to_token": "x"}, r"`req_to_token` must be integers \[requests, slots\]"),
        ({"encoder_lens": 5}, r"`encoder_lens` must be integers \[rows\]"),
        ({"seq_lens": [1]}, r"`req_pool_indices` and `seq_lens` must have the same length. Got .*\(2,\), .*\(1,\)"),
        ({"encoder_lens": [1]}, "`req_pool_indices`, `seq_lens` and `encoder_lens` must have the same length"),
    ],
)
def test_captures_say_what_they_cannot_use(backend, arguments, sentence):
    capture = {"bs": 2, "num_tokens": 2, "req_pool_indices": [0, 0], "seq_lens": [1, 1], "encoder_lens": None}
    capture |= {"forward_mode": ForwardMode.DECODE, "spec_info": None, "req_to_token": NO_SLOTS}
    refused(lambda: backend.init_forward_metadata_capture_cuda_graph(**(capture | arguments)), sentence)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"q": None}, r"`q` must be an array \[tokens, heads, head_dim\]"),
        ({"q": Q[:, :3]}, r"`q` must be \[tokens, 4, 8\], the layer's heads"),
        ({"k": K[0]}, r"`k` must be an array \[tokens, heads, head_dim\]"),
        ({"k": K[:, :1]}, r"`k` must be \[T, 2, 8\] as the pages are"),
        ({"k": K[:1]}, r"`out_cache_loc` must be int32 \[1\]"),
        ({"pool": None}, "`pool` must be of type KVPool"),
        ({"pool": KVPool(())}, "`layer.group` must be one of the 0 groups"),
        ({"metadata": None}, "`metadata` must be of type"),
        ({"layer": None}, "`layer` must be of type AttentionLayer"),
        ({"layer": dataclasses.replace(LAYER, layer_id=5)}, r"`layer.layer_id` must be in 0 .. 1"),
        (
            {"layer": dataclasses.replace(LAYER, v_head_dim=4)},
            "`pool` must have layer.tp_k_head_num=2 heads of",
        ),
        ({"pool": make_pool((GROUP,), num_pages=5, page_size=8, dtype="float32")}, "must have .*pages of"),
    ],
)
def test_calls_say_what_they_cannot_use(backend, arguments, sentence):
    metadata = backend.init_forward_metadata(BATCH)
    call = {"q": Q, "k": K, "v": K, "layer": LAYER, "forward_batch": BATCH, "metadata": metadata, "pool": POOL}
    refused(lambda: backend.forward_decode(**(call | arguments)), sentence)


LATENT = KVGroupSpec(name="latent", num_layers=1, num_kv_heads=1, head_dim=12, v_head_dim=8, latent=True)
LATENT_POOL = make_pool((LATENT,), num_pages=5, page_size=4, dtype="float32")
LATENT_LAYER = AttentionLayer(layer_id=0, **(HEADS | {"tp_k_head_num": 1, "tp_v_head_num": 1, "head_dim": 12}))
VERIFY = dataclasses.replace(
    BATCH, forward_mode=ForwardMode.TARGET_VERIFY, out_cache_loc=(int32(9, 10, 14, 15),), spec_info=EagleVerifyInput()
)


def call(backend, metadata_of=BATCH, **arguments):
    """A decode, whose metadata may be another batch's."""
    metadata = backend.init_forward_metadata(metadata_of)
    usual = {"q": Q, "k": K, "v": K, "layer": LAYER, "forward_batch": BATCH, "metadata": metadata, "pool": POOL}
    return backend.forward_decode(**(usual | arguments))


def verify(**spec_info):
    backend = FlashAttentionBackend(dataclasses.replace(CONFIG, speculative_num_draft_tokens=2))
    return backend.init_forward_metadata(dataclasses.replace(VERIFY, spec_info=EagleVerifyInput(**spec_info)))


EXTEND = dataclasses.replace(
    BATCH, forward_mode=ForwardMode.EXTEND, cu_q_lens=int32(0, 2, 3), out_cache_loc=(int32(7, 8, 14),)
)
ANGLES = jnp.ones((2, 4)), jnp.ones((2, 4))
TREE = jnp.ones(50, bool)


@pytest.mark.parametrize(
    ("calling", "sentence"),
    [
        (lambda: call(BACKENDS[0], EXTEND, q=Q), "`q` must have a row for each of the batch's 3 tokens"),
        (lambda: call(BACKENDS[0], pool=LATENT_POOL), "`pool` must hold latent rows where `attention_arch` is MLA"),
        (
            lambda: call(BACKENDS[0], pool=make_pool((GROUP,), num_pages=5, page_size=4, dtype="fp8")),
            "`kv_cache_dtype` must say whether `pool` is stored in fp8",
        ),
        (
            lambda: call(BACKENDS[1], pool=LATENT_POOL),
            "`pool` must hold keys and values. Got the latent",
        ),
        (
            lambda: LATENT_POOL.set_kv_buffer(LATENT_LAYER, [4, 5], jnp.ones((2, 1, 10)), K),
            r"`cache_k` must be \[tokens, 1, 12\], the latent rows",
        ),
        (lambda: verify(custom_mask=[True]), r"`custom_mask` must be an array \[bits\]"),
        (
            lambda: verify(custom_mask=TREE, positions=[5]),
            "`positions` of `spec_info` must be those of 4",
        ),
        (
            lambda: forward(BACKENDS[0], Q, K, K, LAYER, None, None, POOL),
            "`forward_batch` must be of type ForwardBatch",
        ),
        (
            lambda: forward_rotary(BACKENDS[0], Q, ANGLES, LAYER, BATCH, None, POOL),
            "`qkv` must have the layer's 8 query, key and value heads",
        ),
        (
            lambda: forward_rotary(BACKENDS[0], jnp.ones((2, 8, 8)), (ANGLES[0], Q[0]), LAYER, BATCH, None, POOL),
            r"`angles` must be two arrays \[2, pairs\], cosines and sines",
        ),
        (lambda: FlashAttentionBackend.for_model((LAYER,), None), "`options` must be of type BackendOptions"),
    ],
)
def test_what_does_not_belong_together_is_refused(calling, sentence):
    refused(calling, sentence)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: cdiv(3, 0), "`b` must be a whole number of at least 1"),
        (lambda: FlashAttentionBackend(None), "`config` must be of type FlashAttentionConfig"),
        (lambda: FlashAttentionBackend(CONFIG, topk="x"), "`topk` must be a whole number of at least 0"),
        (lambda: FlashAttentionMultiStepBackend(CONFIG, "x", 2), "`topk` must be a whole number"),
        (lambda: FlashAttentionBackend(CONFIG).init_cuda_graph_state("x"), "`max_bs` must be a whole number"),
        (lambda: HostBatch.of(None), "`forward_batch` must be of type ForwardBatch"),
        (
            lambda: make_pool((GROUP,), num_pages="x", page_size=4, dtype="float32"),
            "`num_pages` must be a whole number",
        ),
        (lambda: make_pool((GROUP,), num_pages=5, page_size=4, dtype="int8"), "`dtype` must be a dtype or one of"),
        (lambda: make_pool(GROUP, num_pages=5, page_size=4, dtype="float32"), "`specs` must be a tuple of KVGroupSpec"),
        (lambda: dataclasses.replace(GROUP, num_kv_heads=0), "`num_kv_heads` must be a whole number of at least 1"),
        (lambda: POOL.get_key_buffer(2), r"`layer_id` must be in 0 .. 1. Got layer_id=2"),
        (lambda: POOL.get_kv_buffer(0, 3), "`group` must be one of the pool's 1 groups"),
        (lambda: POOL.set_kv_buffer(None, [4, 5], K, K), "`layer` must be of type PoolLayer"),
        (lambda: POOL.set_kv_buffer(LAYER, [4.5, 5], K, K), r"`loc` must be integers \[tokens\]"),
        (lambda: POOL.set_kv_buffer(LAYER, [4, 5], K[0], K), "`cache_k` must be an array"),
        (lambda: KVBuffers(None).get_kv_buffer(0), "`pool` must be of type KVPool"),
        (lambda: KVBuffers(POOL).set_kv_buffer(9, [4, 5], K, K), r"`layer_id` must be in 0 .. 1"),
        (lambda: KVBuffers(POOL).set_kv_buffer(0, None, K, K), r"`indices` must be integers \[tokens\]"),
    ],
)
def test_pools_and_backends_say_what_they_cannot_use(call, sentence):
    refused(call, sentence)


def test_window_of_minus_one_is_none():
    """So engines say it."""
    assert dataclasses.replace(CONFIG, sliding_window_size=-1).sliding_window_size is None


def test_pool_takes_arrays_of_numpy_and_numbers_as_scales():
    rows, slots = np.ones((2, 2, 8), np.float32), np.array([4, 5], np.int64)
    keys, _ = POOL.set_kv_buffer(LAYER, slots, rows, rows, k_scale=2.0).get_kv_buffer(0)
    np.testing.assert_array_equal(keys[4:6], 0.5 * rows)
