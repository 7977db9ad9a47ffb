"""Each sentence that a wrong shape or dtype becomes."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, paged_decode, paged_extend, ragged_extend
from jattn_kernels.operands import AttentionOptions
from jattn_kernels.shapes import attention, merge, pages

SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8)
NARROW = dataclasses.replace(SPEC, v_head_dim=6)
HND = dataclasses.replace(SPEC, page_layout="HND")
PAGES_FIRST = dataclasses.replace(SPEC, combined_pool="pages_first")
KV_FIRST = dataclasses.replace(SPEC, combined_pool="kv_first")


def zeros(*shape, dtype=jnp.float32):
    return jnp.asarray(np.zeros(shape, dtype))  # compiles nothing


def ints(*shape):
    return zeros(*shape, dtype=jnp.int32)


DECODE = {
    "q": zeros(3, 1, 4, 8),
    "k_pages": zeros(5, 16, 2, 8),
    "v_pages": zeros(5, 16, 2, 8),
    "page_table": ints(3, 2),
    "seq_lens": ints(3),
}
EXTEND = DECODE | {"q": zeros(7, 4, 8), "cu_q_lens": ints(4)}
RAGGED = {"q": zeros(7, 4, 8), "k": zeros(9, 2, 8), "v": zeros(9, 2, 8), "cu_q_lens": ints(4), "cu_kv_lens": ints(4)}
WRITE = {
    "k_pages": zeros(5, 16, 2, 8),
    "v_pages": zeros(5, 16, 2, 8),
    "k": zeros(6, 2, 8),
    "v": zeros(6, 2, 8),
    "slots": ints(6),
    "layout": "NHD",
    "combined_pool": None,
    "layer_index": None,
}


def options(**fields):
    return {"options": AttentionOptions(**fields)}


def check(function, arguments, change):
    return function(**({"spec": SPEC, "options": AttentionOptions()} | arguments | change))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"spec": HND, "k_pages": zeros(5, 2, 16, 8), "v_pages": zeros(5, 2, 16, 8)},
        {"spec": NARROW, "v_pages": zeros(5, 16, 2, 6)},
        {"spec": PAGES_FIRST, "k_pages": zeros(5, 2, 16, 2, 8), "v_pages": None},
        {"spec": KV_FIRST, "k_pages": zeros(3, 2, 5, 16, 2, 8), "v_pages": None, **options(layer_index=2)},
        {
            "k_pages": zeros(5, 16, 2, 8, dtype=jnp.float8_e4m3fn),
            "v_pages": zeros(5, 16, 2, 8, dtype=jnp.float8_e4m3fn),
        },
        options(q_scale=zeros(3, 2), k_scale=zeros(2), v_scale=zeros(), sinks=zeros(4), alibi_slopes=zeros(4)),
        options(q_start=ints(3), kv_start=ints(3), q_positions=ints(3, 1), custom_mask=zeros(50, dtype=bool)),
    ],
)
def test_check_paged_decode_returns_the_page_size(change):
    assert check(attention.check_paged_decode, DECODE, change) == 16


BAD_DECODE = [
    ({"q": zeros(3, 4, 8)}, r"`q` must be \[B, Q, N, H\] and not empty\. Got q.shape=\(3, 4, 8\)"),
    ({"q": zeros(3, 0, 4, 8)}, r"and not empty\. Got q.shape=\(3, 0, 4, 8\)"),
    ({"q": zeros(3, 1, 2, 8)}, r"`q` must end in \[num_q_heads=4, head_dim=8\]"),
    ({"q": zeros(3, 1, 4, 16)}, r"`q` must end in \[num_q_heads=4, head_dim=8\]"),
    ({"q": zeros(2, 1, 4, 8)}, "`q` must have one row of queries a sequence"),
    ({"q": ints(3, 1, 4, 8)}, r"`q` must be one of float32, .* Got q.dtype=int32"),
    ({"q": zeros(3, 1, 4, 8, dtype=jnp.bfloat16)}, "`q` and `k_pages` must have one dtype"),
    ({"k_pages": zeros(2, 5, 16, 2, 8)}, r"`k_pages` must be \[P, page_size, K, H\], with a leading L exactly if"),
    (options(layer_index=0), r"`k_pages` must be \[L, P, page_size, K, H\], with a leading L exactly if"),
    (
        {"spec": HND},
        r"`k_pages` must have num_kv_heads=2 heads of width 8 in layout HND, \[\.\.\., 2, page_size, 8\]\. Got",
    ),
    (
        {"spec": NARROW},
        r"`v_pages` must have num_kv_heads=2 heads of width 6 in layout NHD, \[\.\.\., page_size, 2, 6\]\. Got",
    ),
    ({"v_pages": zeros(5, 8, 2, 8)}, "`k_pages` and `v_pages` must agree in all axes but the last"),
    ({"v_pages": zeros(5, 16, 2, 8, dtype=jnp.bfloat16)}, "`k_pages` and `v_pages` must have one dtype"),
    ({"v_pages": None}, "`v_pages` may be None only with a combined pool"),
    ({"spec": PAGES_FIRST}, "`v_pages` must be None: a combined pool"),
    (
        {"spec": PAGES_FIRST, "k_pages": zeros(5, 3, 16, 2, 8), "v_pages": None},
        r"combined pool must be \[P, 2, page_size, K, H\]",
    ),
    (
        {"spec": KV_FIRST, "k_pages": zeros(5, 2, 16, 2, 8), "v_pages": None},
        r"combined pool must be \[2, P, page_size, K, H\]",
    ),
    ({"k_pages": zeros(0, 16, 2, 8)}, "`k_pages` must have at least one page of one token"),
    ({"seq_lens": ints(3, 1)}, r"`seq_lens` must be \[B\] and `page_table` \[B, max_pages\]"),
    ({"page_table": ints(3)}, r"`seq_lens` must be \[B\] and `page_table` \[B, max_pages\]"),
    ({"page_table": ints(3, 0)}, "both sizes at least 1"),
    ({"page_table": ints(2, 2)}, r"`page_table` must be int32 \[3, 2\]"),
    ({"page_table": zeros(3, 2, dtype=jnp.int16)}, r"`page_table` must be int32 .* Got page_table.dtype=int16"),
    ({"seq_lens": zeros(3, dtype=jnp.uint32)}, r"`seq_lens` must be int32 .* Got seq_lens.dtype=uint32"),
    ({"seq_lens": [1, 2, 3]}, r"`seq_lens` must be an array of JAX or NumPy\. Got a list\."),
    ({"page_table": None}, r"`page_table` must be an array of JAX or NumPy\. Got None\."),
    ({"v_pages": 1.0}, r"`v_pages` must be an array of JAX or NumPy\. Got a float\."),
    ({"q": zeros(3, 1, 4, 8, dtype=jnp.float8_e4m3fn)}, r"`q` in fp8 needs `k_pages` in fp8\. Got"),
    (options(q_start=5), r"`q_start` must be an array of JAX or NumPy\. Got an int\."),
    (options(custom_mask=[True]), r"`custom_mask` must be an array of JAX or NumPy\. Got a list\."),
    (options(alibi_slopes=[0.5]), r"`alibi_slopes` must be an array of JAX or NumPy\. Got a list\."),
    (options(q_start=ints(4)), r"`q_start` must be int32 \[3\]"),
    (options(kv_start=zeros(3)), r"`kv_start` must be int32 \[3\]"),
    (options(q_positions=ints(3)), r"`q_positions` must be int32 \[3, 1\]"),
    (options(custom_mask=ints(9)), r"`custom_mask` must be bool \[M\]. Got custom_mask.dtype=int32"),
    (options(custom_mask=zeros(3, 3, dtype=bool)), r"`custom_mask` must be bool \[M\]"),
    (options(alibi_slopes=zeros(2)), r"`alibi_slopes` must be floats \[num_q_heads=4\]"),
    (options(sinks=zeros(4, 1)), r"`sinks` must be floats \[num_q_heads=4\]"),
    (options(sinks=ints(4)), r"`sinks` must be floats .* Got sinks.dtype=int32"),
    (options(q_scale=2.0), r"`q_scale` must be None or an array of floats\. Got q_scale=2\.0"),
    (
        options(q_scale=zeros(2, 2)),
        r"`q_scale` must be floats, a scalar or \[2\] \(one a KV head\) or \[3, 2\] \(one row a sequence\)",
    ),
    (options(k_scale=ints(2)), r"`k_scale` must be floats, .* Got k_scale.dtype=int32"),
    (options(v_scale=zeros(4)), r"`v_scale` must be floats, a scalar or \[2\] \(one a KV head\)\. Got"),
    (options(k_scale=zeros(3, 2)), r"`k_scale` must be floats, a scalar or \[2\] \(one a KV head\)\. Got"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_DECODE)
def test_check_paged_decode_says_what_is_wrong(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(attention.check_paged_decode, DECODE, change)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (attention.check_paged_decode, DECODE),
        (attention.check_paged_extend, EXTEND),
        (attention.check_ragged_extend, RAGGED),
        (
            attention.check_schedule_sizes,
            dict.fromkeys(("seq_lens", "cu_q_lens", "num_tokens", "page_size", "max_seq_len")),
        ),
    ],
)
def test_checks_reject_what_is_no_spec(function, arguments):
    if function is not attention.check_schedule_sizes:
        arguments = arguments | options()
    with pytest.raises(ValueError, match=r"`spec` must be an AttentionSpec\. Got a dict\."):
        inspect.unwrap(function)(**arguments, spec={})


@pytest.mark.parametrize("layer_index", [True, 1.0, [0]])
def test_check_paged_decode_rejects_a_layer_that_is_no_integer(layer_index):
    stacked = {"k_pages": zeros(2, 5, 16, 2, 8), "v_pages": zeros(2, 5, 16, 2, 8)}
    with pytest.raises(ValueError, match=r"`layer_index` must be an int or an int32 scalar\. Got layer_index="):
        check(attention.check_paged_decode, DECODE, stacked | options(layer_index=layer_index))


def test_check_paged_decode_takes_any_integer_of_numpy_for_a_layer():
    stacked = {"k_pages": zeros(2, 5, 16, 2, 8), "v_pages": zeros(2, 5, 16, 2, 8)}
    assert check(attention.check_paged_decode, DECODE, stacked | options(layer_index=np.int64(1))) == 16
    out = paged_decode(**(DECODE | stacked), spec=SPEC, layer_index=np.int64(1))
    np.testing.assert_array_equal(out, paged_decode(**(DECODE | stacked), spec=SPEC, layer_index=1))


LENS, OFFSETS = np.array([3, 0, 4], np.int32), np.array([0, 2, 2, 7], np.int32)


@pytest.mark.parametrize(
    ("face", "arguments", "least"),
    [
        (paged_decode, DECODE | {"q": zeros(3, 2, 4, 8), "seq_lens": LENS}, 2 * 7),
        (paged_extend, EXTEND | {"seq_lens": LENS, "cu_q_lens": OFFSETS}, 2 * 3 + 5 * 4),
        (ragged_extend, RAGGED | {"cu_kv_lens": OFFSETS, "cu_q_lens": OFFSETS}, 2 * 2 + 5 * 5),
    ],
)
def test_mask_that_lacks_values_is_refused_where_lengths_are_known(face, arguments, least):
    arguments = {name: jnp.asarray(array) for name, array in arguments.items()}
    call = functools.partial(face, spec=SPEC)
    short, whole = jnp.ones(least - 1, bool), jnp.ones(least, bool)
    with pytest.raises(ValueError, match=rf"M at least {least}, .* Got custom_mask.shape=\({least - 1},\)"):
        call(**arguments, custom_mask=short)
    assert jax.eval_shape(call, **arguments, custom_mask=short).shape == call(**arguments, custom_mask=whole).shape


def test_check_paged_decode_takes_scales_of_each_layer_exactly_if_pages_have_layers():
    stacked = {"k_pages": zeros(2, 5, 16, 2, 8), "v_pages": zeros(2, 5, 16, 2, 8)}
    given = options(layer_index=0, k_scale=zeros(2, 2), v_scale=zeros(2))
    assert check(attention.check_paged_decode, DECODE, stacked | given) == 16
    with pytest.raises(ValueError, match=r"or \[2, 2\] \(one row a layer\)\. Got .* v_scale.shape=\(3, 2\)"):
        check(attention.check_paged_decode, DECODE, stacked | options(layer_index=0, v_scale=zeros(3, 2)))


@pytest.mark.parametrize("kind", [int, np.int32, jnp.int32])
@pytest.mark.parametrize("layer_index", [-1, 2])
def test_check_paged_decode_rejects_a_layer_out_of_range(layer_index, kind):
    stacked = {"k_pages": zeros(2, 5, 16, 2, 8), "v_pages": zeros(2, 5, 16, 2, 8)}
    with pytest.raises(ValueError, match=rf"`layer_index` must be in 0 \.\. 1\. Got layer_index={layer_index}"):
        check(attention.check_paged_decode, DECODE, stacked | options(layer_index=kind(layer_index)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q": zeros(7, 1, 4, 8)}, r"`q` must be \[T, N, H\]"),
        *[({"cu_q_lens": other}, "`cu_q_lens`") for other in (None, ints(3), zeros(4))],
        (options(q_positions=ints(3)), "`q_positions`"),
        ({"seq_lens": ints(2)}, "`page_table`"),
        ({"seq_lens": ints(0), "page_table": ints(0, 2), "cu_q_lens": ints(1)}, "`seq_lens`"),
    ],
)
def test_check_paged_extend_says_what_is_wrong(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(attention.check_paged_extend, EXTEND, change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"v": None}, "`v`"),
        ({"k": zeros(9, 3, 8)}, r"`k` must be \[S, num_kv_heads=2, 8\] and not empty"),
        ({"v": zeros(9, 2, 8), "spec": NARROW}, r"`v` must be \[S, num_kv_heads=2, 6\]"),
        ({"k": zeros(2, 9, 2, 8)}, "with a leading L exactly if `layer_index` is given"),
        (options(layer_index=0), "with a leading L exactly if `layer_index` is given"),
        ({"v": zeros(8, 2, 8)}, "`k` and `v` must have one row a token"),
        ({"v": zeros(9, 2, 8, dtype=jnp.bfloat16)}, "`k` and `v`"),
        ({"q": zeros(7, 4, 8, dtype=jnp.float16)}, "`q` and `k`"),
        ({"cu_q_lens": ints(1)}, r"`cu_q_lens` must be \[B \+ 1\]"),
        ({"cu_kv_lens": ints(5)}, "`cu_kv_lens`"),
    ],
)
def test_check_ragged_extend_says_what_is_wrong(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(attention.check_ragged_extend, RAGGED, change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k": zeros(6, 2, 4)}, r"`k` must be \[T, 2, 8\] as the pages are"),
        ({"v": zeros(6, 16)}, r"`v` must be \[T, 2, 8\] as the pages are"),
        ({"v": zeros(5, 2, 8)}, "`k` and `v` must have one row a slot"),
        *[({"slots": other}, "`slots`") for other in (ints(5), zeros(6))],
        ({"layer_index": 0}, "`k_pages`"),
        ({"k_pages": ints(5, 16, 2, 8), "v_pages": ints(5, 16, 2, 8)}, "`k_pages`"),
        *[({name: ints(6, 2, 8)}, f"`{name}`") for name in ("k", "v")],
        ({"layout": "XXX"}, r"`layout` must be one of NHD, HND\. Got layout='XXX'"),
        (
            {"combined_pool": "XXX", "v_pages": None},
            r"`combined_pool` must be None or one of pages_first, kv_first\. Got",
        ),
        *[({name: other}, f"`{name}`") for name in ("k_scale", "v_scale") for other in (2.0, zeros(3), ints())],
    ],
)
def test_check_page_rows_says_what_is_wrong(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        pages.check_page_rows(**(WRITE | change))


@pytest.mark.parametrize(("outs", "lses"), [((2, 5, 3, 4), (1, 5, 3)), ((0, 5, 3, 4), (0, 5, 3)), ((4,), ())])
def test_check_merge_rejects_parts_that_do_not_belong_together(outs, lses):
    with pytest.raises(ValueError, match=r"`lses` must have the shape of `outs` without its last axis"):
        merge.check_merge(zeros(*outs), zeros(*lses))


def test_check_merge_takes_floats_only():
    with pytest.raises(ValueError, match=r"`outs` must be one of float32, .* Got outs.dtype=int32"):
        merge.check_merge(ints(2, 5, 3, 4), zeros(2, 5, 3))
