"""Backends by their names, made for a model's layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jattn.attention.paged import PagedAttentionBackend
from jattn.backend import BACKENDS, AttentionLayer, BackendOptions, EngineBackend, backend_class, forward
from jattn.flash_attention import FlashAttentionBackend
from jattn.flashinfer import FlashInferAttnBackend
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import KVGroupSpec, make_pool
from jattn_kernels.call import Device
from tests.kernels.harness.triton_interpreter import interpreted

OPTIONS = BackendOptions(max_context_len=64, page_size=4, max_num_seqs=2, dtype="bfloat16", kv_cache_dtype="fp8")
LAYER = AttentionLayer(
    layer_id=0, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, head_dim=16, v_head_dim=16, scaling=0.25
)
WINDOWED = dataclasses.replace(LAYER, sliding_window_size=7)


def test_backends_go_by_their_names():
    assert backend_class("flash_attention") is FlashAttentionBackend
    assert backend_class("flashinfer") is FlashInferAttnBackend
    assert backend_class("paged") is PagedAttentionBackend
    with pytest.raises(ValueError, match=r"`backend` must be one of flash_attention, flashinfer, paged. Got 'nothing'"):
        backend_class("nothing")


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_of_a_model_is_static_and_knows_its_layers(name):
    backend = backend_class(name).for_model((LAYER, WINDOWED), OPTIONS)
    assert isinstance(backend, EngineBackend)
    assert hash(backend) == hash(backend_class(name).for_model((LAYER, WINDOWED), OPTIONS))
    assert (backend.max_context_len, backend.page_size) == (64, 4)


def test_engine_that_drafts_through_flashinfer_is_refused_in_the_engines_words():
    options = dataclasses.replace(OPTIONS, speculative_num_draft_tokens=5)
    with pytest.raises(NotImplementedError, match=r"`speculative` must be None with `backend` .* Got 4 drafted tokens"):
        FlashInferAttnBackend.for_model((LAYER,), options)
    with pytest.raises(ValueError, match=r"`max_num_seqs` must be a whole number of at least 1. Got 0"):
        FlashInferAttnBackend.for_model((LAYER,), dataclasses.replace(OPTIONS, max_num_seqs=0))


def test_model_of_latent_rows_is_refused_by_flashinfer_before_it_compiles():
    latent = dataclasses.replace(LAYER, tp_k_head_num=1, tp_v_head_num=1, v_head_dim=8, kv="latent")
    with pytest.raises(NotImplementedError, match=r"`kv` must be 'heads' .* use `paged` or `flash_attention`. Got .*"):
        FlashInferAttnBackend.for_model((latent,), OPTIONS)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_latent_rows_beside_keys_of_heads_are_refused_by_flash_attention(num_kv_heads):
    """As DeepSeek's with a Llama to draft for it; the engine's own backend serves them."""
    latent = dataclasses.replace(LAYER, tp_k_head_num=1, tp_v_head_num=1, v_head_dim=8, kv="latent")
    heads = dataclasses.replace(LAYER, tp_k_head_num=num_kv_heads, tp_v_head_num=num_kv_heads)
    with pytest.raises(NotImplementedError, match=r"must all read latent rows, .* use `paged`. Got heads and latent"):
        FlashAttentionBackend.for_model((latent, heads), OPTIONS)
    PagedAttentionBackend.for_model((latent, heads), OPTIONS)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tp_q_head_num": 2}, r"must have the same heads, .* Got heads and widths \[\(2, 2, 16\), \(4, 2, 16\)\]"),
        ({"sliding_window_size": 9}, r"one window or none: use `paged`. .* windows \[7, 9\]"),
        (
            {"sinks": jax.ShapeDtypeStruct((4,), "float32")},
            "`sinks` must be None in layers of a FlashInfer backend: use `paged` or `flash_attention`. Got 4 sinks",
        ),
        ({"chunk_size": 8}, "`chunk_size` must be None in layers of a FlashInfer backend: use `paged`"),
    ],
)
def test_model_whose_layers_flashinfer_cannot_tell_apart_is_refused(other, message):
    layers = (WINDOWED, dataclasses.replace(LAYER, **other))
    with pytest.raises(NotImplementedError, match=message):
        FlashInferAttnBackend.for_model(layers, OPTIONS)
    FlashAttentionBackend.for_model(layers, OPTIONS)


@pytest.mark.parametrize(
    ("mode", "operation"), [(ForwardMode.DECODE, "mla_decode"), (ForwardMode.EXTEND, "mla_extend")]
)
@pytest.mark.parametrize("name", ["paged", "flash_attention"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_layers_of_latent_rows_share_a_schedule(monkeypatch, name, mode, operation, kv_cache_dtype):
    """It is made once for all layers, and is the one that their calls take."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    widths = {"head_dim": 576, "v_head_dim": 512, "tp_q_head_num": 16, "tp_k_head_num": 1, "tp_v_head_num": 1}
    layer = dataclasses.replace(LAYER, kv="latent", **widths)
    options = dataclasses.replace(OPTIONS, page_size=16, kv_cache_dtype=kv_cache_dtype, implementation="triton")
    backend = backend_class(name).for_model((layer,), options)
    spec = KVGroupSpec(name="all", num_layers=2, num_kv_heads=1, head_dim=576, v_head_dim=512, latent=True)
    dtype = jnp.float8_e4m3fn if kv_cache_dtype == "fp8" else jnp.bfloat16
    pool = jax.eval_shape(lambda: make_pool((spec,), num_pages=8, page_size=16, dtype=dtype))
    numbers = jnp.arange(2, dtype=jnp.int32)
    batch = ForwardBatch(
        forward_mode=mode,
        input_ids=numbers,
        positions=numbers,
        seq_lens=numbers + 1,
        cu_q_lens=jnp.arange(3, dtype=jnp.int32),
        out_cache_loc=(numbers,),
        page_tables=(jnp.zeros((2, 4), jnp.int32),),
    )
    metadata = jax.eval_shape(backend.init_forward_metadata, batch)
    (schedule,) = metadata.schedules
    assert schedule.call.operation == operation
    monkeypatch.setattr("jattn_kernels.triton.attention.entry._work", lambda *_: pytest.fail("one is there"))
    q, row = jnp.zeros((2, 16, 576), jnp.bfloat16), jnp.zeros((2, 1, 576), jnp.bfloat16)
    rest = (layer, batch, metadata, pool)
    with interpreted():
        out, _ = jax.eval_shape(functools.partial(forward, backend, q, row, row[..., :512]), *rest)
    assert out.shape == (2, 16, 512)
