"""What min-p, top-k and top-p keep, against the oracle, and the sentences for what does not fit."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import kept_tokens
from jattn_kernels.call import Device
from jattn_kernels.xla import filters as xla
from tests.kernels.harness.filter_cases import assert_kept, filters, mixed_filters, normal_logits, odd_logits

kept = jax.jit(kept_tokens, static_argnames="implementation")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.9},
        {"top_p": 0.0},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 50, "top_p": 0.9},
        {"temperature": 3.0, "top_k": 80, "top_p": 0.7, "min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [None, 0.5])
def test_filters_keep_what_the_oracle_keeps(asked, step):
    logits, asked = normal_logits((5, 300), step=step), filters(5, **asked)
    assert_kept(kept(logits, **asked), logits, asked)


@pytest.mark.parametrize("seed", range(4))
def test_filters_of_odd_rows(seed):
    logits = odd_logits(97)
    asked = mixed_filters(len(logits), seed)
    assert_kept(kept(logits, **asked), logits, asked)


def test_filters_are_off_where_they_are_zero_or_one_and_in_greedy_rows():
    logits = odd_logits(97)
    for asked in (filters(len(logits)), filters(len(logits), temperature=0.0, top_k=3, top_p=0.1, min_p=0.9)):
        np.testing.assert_array_equal(kept(logits, **asked), logits > -jnp.inf)


def test_filters_take_narrow_logits():
    logits = normal_logits((4, 200)).astype(jnp.bfloat16)
    asked = filters(4, top_k=20, top_p=0.8)
    assert_kept(kept(logits, **asked), np.asarray(logits, np.float32), asked)


@pytest.mark.parametrize("vocab_size", [2**18, 262_208])
def test_sums_of_equal_tokens_do_not_overflow(vocab_size):
    logits, asked = jnp.zeros((1, vocab_size)), filters(1, top_p=0.75)
    np.testing.assert_array_equal(np.flatnonzero(kept(logits, **asked)[0]), np.arange(vocab_size * 3 // 4))


@pytest.mark.parametrize("digit_bits", [2, 4])
def test_digits_of_any_width_find_the_same_tokens(monkeypatch, digit_bits):
    logits = normal_logits((6, 777), step=0.125)  # many ties
    asked = filters(
        6,
        temperature=0.8,
        top_k=[0, 5, 40, 0, 777, 1],
        top_p=[0.9, 1.0, 0.5, 0.999, 0.0, 0.9],
        min_p=[0.0, 0.0, 0.0, 0.1, 0.0, 0.0],
    )
    one_by_one = kept_tokens(logits, **asked)
    monkeypatch.setattr(xla, "_digit_bits", lambda device, num_keys: digit_bits)
    np.testing.assert_array_equal(kept_tokens(logits, **asked), one_by_one)


@pytest.mark.parametrize(
    ("platform", "rows", "asks"), [("cpu", 2, True), ("gpu", 2, False), ("gpu", 64, True), ("tpu", 64, True)]
)
def test_only_a_gpu_of_few_keys_searches_without_asking(monkeypatch, platform, rows, asks):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device(platform))
    logits = jax.ShapeDtypeStruct((rows, 128_256), jnp.float32)
    search = functools.partial(kept_tokens, implementation="xla")
    assert ("stablehlo.case" in jax.jit(search).lower(logits, **filters(rows)).as_text()) == asks


def test_mosaic_refuses_filters(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    with pytest.raises(NotImplementedError, match="`mosaic` does not do kept_tokens"):
        kept_tokens(jnp.ones((1, 5)), **filters(1), implementation="mosaic")


@pytest.mark.parametrize(
    ("logits", "changes", "match"),
    [
        ([1.0], {}, "`logits` must be an array"),
        (jnp.ones(5), {}, r"`logits` must be \[B, V\]"),
        (jnp.ones((2, 0)), {}, "of some tokens"),
        (jnp.ones((2, 5), jnp.int32), {}, "`logits` must be of some tokens, in one of float32"),
        (jnp.ones((2, 5)), {"top_k": jnp.zeros(2)}, "`top_k` must be int32"),
        (jnp.ones((2, 5)), {"top_k": jnp.zeros(3, jnp.int32)}, "`top_k` must be int32"),
        (jnp.ones((2, 5)), {"top_p": jnp.ones(1)}, "`top_p` must be float32"),
        (jnp.ones((2, 5)), {"min_p": 0.5}, "`min_p` must be an array"),
        (jnp.ones((2, 5)), {"temperature": jnp.ones(2, jnp.bfloat16)}, "`temperature` must be float32"),
    ],
)
def test_bad_arguments_get_a_sentence(logits, changes, match):
    with pytest.raises(ValueError, match=match):
        inspect.unwrap(kept_tokens)(logits, **filters(2) | changes)


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "step"), [(128_256, None), (128_256, 0.03125), (151_936, None), (50_257, None)])
def test_triton_keeps_on_a_gpu_what_xla_keeps(vocab_size, step):
    logits = jnp.concatenate([normal_logits((32, vocab_size), scale=scale, step=step) for scale in (0.5, 1.3, 4.0)])
    asked = mixed_filters(len(logits))
    ours, theirs = (np.asarray(kept(logits, **asked, implementation=name)) for name in ("triton", "xla"))
    assert_kept(ours, logits, asked)
    by_count = np.asarray(asked["top_p"]) == 1  # sums of exponentials are rounded by either in its own way
    np.testing.assert_array_equal(ours[by_count], theirs[by_count])
    assert np.mean(np.all(ours == theirs, axis=1)) > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_triton_keeps_on_a_gpu_what_the_oracle_keeps_of_odd_rows(seed):
    logits = odd_logits(30_011)
    asked = mixed_filters(len(logits), seed)
    assert_kept(kept(logits, **asked, implementation="triton"), logits, asked)
