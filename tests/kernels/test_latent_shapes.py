"""Each sentence that a wrong shape or dtype of a call over latent pages becomes."""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.operands import AttentionOptions
from jattn_kernels.shapes import latent

SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=10, v_head_dim=8, sm_scale=0.3)


def zeros(*shape, dtype=jnp.float32):
    return jnp.asarray(np.zeros(shape, dtype))  # compiles nothing


def ints(*shape):
    return zeros(*shape, dtype=jnp.int32)


def spec(**fields):
    return {"spec": dataclasses.replace(SPEC, **fields)}


def options(**fields):
    return {"options": AttentionOptions(**fields)}


DECODE = {
    "q_nope": zeros(3, 1, 4, 8),
    "q_pe": zeros(3, 1, 4, 2),
    "latent_pages": zeros(5, 16, 10),
    "page_table": ints(3, 2),
    "seq_lens": ints(3),
    "spec": SPEC,
    "options": AttentionOptions(),
}
EXTEND = DECODE | {"q_nope": zeros(7, 4, 8), "q_pe": zeros(7, 4, 2), "cu_q_lens": ints(4)}
WRITE = {
    "latent_pages": zeros(5, 16, 10),
    "c_kv": zeros(6, 8),
    "k_pe": zeros(6, 2),
    "slots": ints(6),
    "layer_index": None,
    "kv_scale": None,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"latent_pages": zeros(5, 16, 10, dtype=jnp.float8_e4m3fn), **options(k_scale=zeros(), v_scale=zeros())},
        {"latent_pages": zeros(2, 5, 16, 10), **options(layer_index=1, k_scale=zeros(2, 1), v_scale=zeros(2, 1))},
    ],
)
def test_check_mla_decode_returns_the_page_size(change):
    assert latent.check_mla_decode(**(DECODE | change)) == 16


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (spec(num_q_heads=4, num_kv_heads=2), "must have num_kv_heads=1 and a v_head_dim smaller than its head_dim"),
        (spec(v_head_dim=None), r"a v_head_dim smaller than its head_dim\. Got .*v_head_dim=None"),
        (spec(sm_scale=None), r"`sm_scale` of absorbed MLA must be given: .* Got sm_scale=None"),
        (spec(rope_theta=1e4), "`rope_theta` must be None in MLA"),
        *[({name: [1]}, f"`{name}`") for name in ("q_nope", "q_pe", "latent_pages", "page_table", "seq_lens")],
        ({"q_nope": zeros(3, 4, 8)}, r"`q_nope` must be \[B, Q, N, 8\] with N = num_q_heads = 4"),
        ({"q_nope": zeros(3, 0, 4, 8)}, "and not empty"),
        ({"q_pe": zeros(3, 1, 4, 3)}, r"`q_pe` must be \[B, Q, N, 2\]"),
        ({"q_pe": zeros(2, 1, 4, 2)}, "`q_nope` and `q_pe` must have the same rows"),
        ({"q_pe": zeros(3, 1, 4, 2, dtype=jnp.bfloat16)}, "`q_nope` and `q_pe`"),
        ({"latent_pages": zeros(5, 16, 1, 10)}, r"`latent_pages` must be \[P, page_size, W\] and not empty, with"),
        (options(layer_index=0), r"with a leading L exactly if `layer_index` is given"),
        ({"latent_pages": zeros(2, 5, 16, 10), **options(layer_index=2)}, "`layer_index`"),
        ({"latent_pages": zeros(5, 16, 9)}, "`latent_pages` must have rows of head_dim=10"),
        ({"latent_pages": ints(5, 16, 10)}, "`latent_pages`"),
        ({"latent_pages": zeros(5, 16, 10, dtype=jnp.float16)}, "`q_nope` and `latent_pages`"),
        ({"seq_lens": ints(2), "page_table": ints(2, 2)}, "`q_nope`"),
        ({"page_table": ints(2, 2)}, r"`page_table` must be int32 \[3, 2\]"),
        (options(q_positions=ints(3)), r"`q_positions` must be int32 \[3, 1\]"),
        (options(k_scale=zeros(4)), r"`kv_scale` must be floats, a scalar or \[1\] \(one a KV head\)\. Got"),
        (options(q_scale=zeros(4)), r"`q_scale` must be floats, a scalar or \[1\]"),
        (options(sinks=zeros(1)), r"`sinks` must be floats \[num_q_heads=4\]"),
    ],
)
def test_check_mla_decode_says_what_is_wrong(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(latent.check_mla_decode)(**(DECODE | change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q_nope": zeros(7, 1, 4, 8)}, r"`q_nope` must be \[T, N, 8\]"),
        ({"cu_q_lens": ints(3)}, "`cu_q_lens`"),
        (options(q_positions=ints(3)), "`q_positions`"),
    ],
)
def test_check_mla_extend_says_what_is_wrong(change, sentence):
    assert latent.check_mla_extend(**EXTEND) == 16
    with pytest.raises(ValueError, match=sentence):
        latent.check_mla_extend(**(EXTEND | change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"c_kv": zeros(6, 7)}, r"`c_kv` and `k_pe` must be \[T, C\] and \[T, R\] with C \+ R = 10"),
        ({"k_pe": zeros(6, 1, 2)}, r"`c_kv` and `k_pe` must be \[T, C\] and \[T, R\]"),
        ({"k_pe": zeros(5, 2)}, "`c_kv` and `k_pe` must have one row a slot"),
        ({"k_pe": zeros(6, 2, dtype=jnp.bfloat16)}, "`c_kv` and `k_pe`"),
        ({"c_kv": ints(6, 8), "k_pe": ints(6, 2)}, "`c_kv`"),
        ({"slots": ints(5)}, "`slots`"),
        ({"layer_index": 0}, "with a leading L exactly if `layer_index` is given"),
        ({"kv_scale": zeros(5, 1)}, r"`kv_scale` must be floats, a scalar or \[1\] \(one a KV head\)\. Got"),
    ],
)
def test_check_latent_rows_says_what_is_wrong(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        latent.check_latent_rows(**(WRITE | change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"slots": zeros(6)}, "`slots`"),
        ({"slots": ints(2, 3)}, "`slots`"),
        ({"layer_index": 0}, "with a leading L exactly if `layer_index` is given"),
        ({"kv_scale": zeros(5, 1)}, r"`kv_scale` must be floats, a scalar or \[1\] \(one a KV head\)\. Got"),
    ],
)
def test_check_latent_places_says_what_is_wrong(change, sentence):
    read = {name: WRITE[name] for name in ("latent_pages", "slots", "layer_index", "kv_scale")}
    with pytest.raises(ValueError, match=sentence):
        latent.check_latent_places(**(read | change))
