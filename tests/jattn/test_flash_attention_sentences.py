"""What SGLang's and pymllm's backends and the pool refuse of what a user hands over: the argument is named."""

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
from jattn.kv_pool import KVGroupSpec, make_pool
from jattn.spec_info import EagleVerifyInput
from tests.jattn.harness.refusals import refused

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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_context_len", "x"),
        ("attention_chunk_size", "x"),
        ("sliding_window_size", "x"),
        ("dtype", "int8"),
        ("kv_cache_dtype", ["fp8"]),
        ("layers", 5),
        ("layers", (5,)),
        ("implementation", 5),
    ],
)
def test_config_names_what_it_cannot_use(field, value):
    refused(lambda: dataclasses.replace(CONFIG, **{field: value}), field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp_q_head_num", 3),
        ("tp_k_head_num", 0),
        ("scaling", None),
        ("logit_cap", -1.0),
        ("sliding_window_size", None),
        ("group", "x"),
    ],
)
def test_layer_names_what_it_cannot_be(field, value):
    refused(lambda: dataclasses.replace(LAYER, **{field: value}), field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_cache_dtype", "int8"),
        ("q_dtype", "x"),
        ("num_heads", 3),
        ("req_to_token", None),
        ("req_to_token", 5),
        ("sliding_window_size", 1.5),
        ("max_req_pool_size", None),
    ],
)
def test_pymllm_backend_names_what_it_cannot_use(field, value):
    refused(lambda: FlashInferAttnBackend(**(PYMLLM | {field: value})), field)


@pytest.mark.parametrize("name", ["fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"])
def test_backends_take_the_names_of_fp8(name):
    assert dataclasses.replace(CONFIG, kv_cache_dtype=name, dtype="torch.bfloat16").is_fp8
    assert FlashInferAttnBackend(**(PYMLLM | {"kv_cache_dtype": name})).kv_cache_dtype == jnp.float8_e4m3fn
    assert FlashInferAttnBackend(**PYMLLM).kv_cache_dtype == jnp.float32


def planned(backend, **fields):
    return backend.init_forward_metadata(dataclasses.replace(BATCH, **fields))


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"input_ids": None}, "input_ids"),
        ({"seq_lens": jnp.array([5.0, 3.0])}, "seq_lens"),
        ({"page_tables": BATCH.page_tables[0]}, "page_tables"),
        ({"page_tables": (BATCH.page_tables[0][:1],)}, "page_tables"),
        ({"encoder_lens": int32(4)}, "encoder_lens"),
        ({"encoder_lens": [1.5, 2]}, "encoder_lens"),
        ({"out_cache_loc": ()}, "out_cache_loc"),
        ({"out_cache_loc": BATCH.out_cache_loc * 2}, "page_tables"),
        ({"forward_mode": ForwardMode.EXTEND, "cu_q_lens": None}, "cu_q_lens"),
        ({"forward_mode": ForwardMode.EXTEND, "cu_q_lens": int32(0, 1)}, "cu_q_lens"),
        ({"spec_info": 5}, "spec_info"),
        ({"page_tables": (), "req_pool_indices": int32(0, 1), "req_to_token_pool": NO_SLOTS}, "req_to_token_pool"),
    ],
)
def test_what_is_no_batch_is_named(fields, argument):
    refused(lambda: planned(BACKENDS[0], **fields), argument)


of_both = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)


@of_both
def test_backends_refuse_batches_without_places(backend):
    refused(lambda: planned(backend, forward_mode="DECODE"), "forward_mode")
    refused(lambda: planned(backend, page_tables=(), req_pool_indices=int32(0, 1)), "forward_batch")
    empty = {"page_tables": (), "req_pool_indices": int32(0, 1), "req_to_token_pool": ReqToTokenPool(None)}
    refused(lambda: planned(backend, **empty), "req_to_token")


@of_both
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("bs", "x"),
        ("forward_mode", None),
        ("seq_lens", [1.5, 1]),
        ("req_to_token", "x"),
        ("req_pool_indices", None),
        ("req_pool_indices", [0]),
    ],
)
def test_captures_name_what_they_cannot_use(backend, argument, value):
    capture = {"bs": 2, "num_tokens": 2, "req_pool_indices": [0, 0], "seq_lens": [1, 1], "encoder_lens": None}
    capture |= {"forward_mode": ForwardMode.DECODE, "spec_info": None, "req_to_token": NO_SLOTS}
    refused(lambda: backend.init_forward_metadata_capture_cuda_graph(**(capture | {argument: value})), argument)


LATENT = KVGroupSpec(name="latent", num_layers=1, num_kv_heads=1, head_dim=12, v_head_dim=8, latent=True)
LATENT_POOL = make_pool((LATENT,), num_pages=5, page_size=4, dtype="float32")
LATENT_LAYER = AttentionLayer(layer_id=0, **(HEADS | {"tp_k_head_num": 1, "tp_v_head_num": 1, "head_dim": 12}))
WIDE_POOL = make_pool((GROUP,), num_pages=5, page_size=8, dtype="float32")
FP8_POOL = make_pool((GROUP,), num_pages=5, page_size=4, dtype="fp8")


def call(backend, metadata_of=BATCH, **arguments):
    """A decode, whose metadata may be another batch's."""
    metadata = backend.init_forward_metadata(metadata_of)
    usual = {"q": Q, "k": K, "v": K, "layer": LAYER, "forward_batch": BATCH, "metadata": metadata, "pool": POOL}
    return backend.forward_decode(**(usual | arguments))


@of_both
@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"k": K[:, :1]}, "k"),
        ({"k": K[:1]}, "out_cache_loc"),
        ({"metadata": None}, "metadata"),
        ({"layer": None}, "layer"),
        ({"layer": dataclasses.replace(LAYER, layer_id=5)}, "layer.layer_id"),
        ({"layer": dataclasses.replace(LAYER, v_head_dim=4)}, "pool"),
        ({"pool": WIDE_POOL}, "pool"),
        ({"pool": LATENT_POOL}, "pool"),
    ],
)
def test_calls_name_what_they_cannot_use(backend, arguments, argument):
    refused(lambda: call(backend, **arguments), argument)


def verify(**spec_info):
    backend = FlashAttentionBackend(dataclasses.replace(CONFIG, speculative_num_draft_tokens=2))
    mode, slots = ForwardMode.TARGET_VERIFY, (int32(9, 10, 14, 15),)
    return planned(backend, forward_mode=mode, out_cache_loc=slots, spec_info=EagleVerifyInput(**spec_info))


EXTEND = dataclasses.replace(
    BATCH, forward_mode=ForwardMode.EXTEND, cu_q_lens=int32(0, 2, 3), out_cache_loc=(int32(7, 8, 14),)
)
ANGLES = jnp.ones((2, 4)), jnp.ones((2, 4))
QKV = jnp.ones((2, 8, 8))


def rotary(qkv, angles):
    return forward_rotary(BACKENDS[0], qkv, angles, LAYER, BATCH, None, POOL)


def pool_of(specs=(GROUP,), num_pages=5, dtype="float32"):
    return make_pool(specs, num_pages=num_pages, page_size=4, dtype=dtype)


@pytest.mark.parametrize(
    ("calling", "argument"),
    [
        (lambda: call(BACKENDS[0], EXTEND), "q"),
        (lambda: call(BACKENDS[0], pool=FP8_POOL), "kv_cache_dtype"),
        (lambda: call(BACKENDS[0], layer=dataclasses.replace(LAYER, sinks=jnp.ones(3))), "layer.sinks"),
        (lambda: call(BACKENDS[0], layer=dataclasses.replace(LAYER, sinks="x")), "layer.sinks"),
        (lambda: dataclasses.replace(LATENT_LAYER, kv="latent", v_head_dim=8, sinks=jnp.ones(4)), "sinks"),
        (lambda: verify(custom_mask=[True]), "custom_mask"),
        (lambda: verify(custom_mask=jnp.ones(50, bool), positions=[5]), "positions"),
        (lambda: forward(BACKENDS[0], Q, K, K, LAYER, None, None, POOL), "forward_batch"),
        (lambda: rotary(Q, ANGLES), "qkv"),
        (lambda: rotary(QKV, (ANGLES[0], Q[0])), "angles"),
        (lambda: FlashAttentionBackend.for_model((LAYER,), None), "options"),
        (lambda: FlashAttentionBackend(None), "config"),
        (lambda: FlashAttentionBackend(CONFIG, topk="x"), "topk"),
        (lambda: FlashAttentionBackend(CONFIG).init_cuda_graph_state("x"), "max_bs"),
        (lambda: FlashAttentionMultiStepBackend(CONFIG, "x", 2), "topk"),
        (lambda: cdiv(3, 0), "b"),
        (lambda: HostBatch.of(None), "forward_batch"),
        (lambda: pool_of(num_pages="x"), "num_pages"),
        (lambda: pool_of(dtype="int8"), "dtype"),
        (lambda: pool_of(GROUP), "specs"),
        (lambda: dataclasses.replace(GROUP, num_kv_heads=0), "num_kv_heads"),
        (lambda: POOL.get_key_buffer(2), "layer_id"),
        (lambda: POOL.get_kv_buffer(0, 3), "group"),
        (lambda: POOL.set_kv_buffer(None, [4, 5], K, K), "layer"),
        (lambda: LATENT_POOL.set_kv_buffer(LATENT_LAYER, [4, 5], jnp.ones((2, 1, 10)), K), "cache_k"),
        (lambda: KVBuffers(None).get_kv_buffer(0), "pool"),
        (lambda: KVBuffers(POOL).set_kv_buffer(9, [4, 5], K, K), "layer_id"),
        (lambda: KVBuffers(POOL).set_kv_buffer(0, None, K, K), "indices"),
    ],
)
def test_pools_and_backends_name_what_they_cannot_use(calling, argument):
    refused(calling, argument)


def test_window_of_minus_one_is_none():
    """So engines say it."""
    assert dataclasses.replace(CONFIG, sliding_window_size=-1).sliding_window_size is None


def test_pool_takes_arrays_of_numpy_and_numbers_as_scales():
    rows, slots = np.ones((2, 2, 8), np.float32), np.array([4, 5], np.int64)
    keys, _ = POOL.set_kv_buffer(LAYER, slots, rows, rows, k_scale=2.0).get_kv_buffer(0)
    np.testing.assert_array_equal(keys[4:6], 0.5 * rows)
