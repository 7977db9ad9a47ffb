"""The bound on what an implementation may differ from the oracle by: it lets rounding pass, and no other rule."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.harness.case_table import CASES, Case, Inputs, assert_close, build, by_name, oracle


def as_answer(case: Case, out: np.ndarray, lse: np.ndarray) -> tuple:
    return jnp.asarray(out.astype(np.float32)).astype(case.out_dtype), jnp.asarray(lse.astype(np.float32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_assert_close_accepts_the_rounded_oracle(case):
    inputs = build(case)
    assert_close(case, inputs, *as_answer(case, *oracle(case, inputs)))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("paged_decode_giant", {"window_left": 298}),
        ("paged_extend_giant", {"window_left": 298}),
        ("paged_extend_window", {"window_left": 4}),
        ("paged_decode_chunk", {"chunk_size": None}),
        ("ragged_extend_bfloat16", {"causal": False}),
        ("paged_extend_group_4_dim_64", {"sm_scale": 0.126}),
        ("paged_decode_soft_cap", {"logits_soft_cap": 5.01}),
        ("ragged_extend_rope", {"rope_theta": 1.02e4}),
        ("paged_extend_rope_and_kv_start", {"rope_scale": 8.1}),
        ("paged_decode_tree_rope", {"rope_theta": None}),
        ("paged_extend_cross_attention", {"causal": True}),
        ("mla_decode_fp8_layers", {"sm_scale": 24**-0.5}),
    ],
)
def test_assert_close_rejects_another_rule(name, wrong):
    (case,) = by_name(name)
    inputs = build(case)
    other = dataclasses.replace(case.spec, **wrong)
    out, lse = oracle(case, Inputs(inputs.args, inputs.kwargs | {"spec": other}))
    with pytest.raises(AssertionError, match=name):
        assert_close(case, inputs, *as_answer(case, out, lse))


@pytest.mark.parametrize(
    ("name", "argument", "change"),
    [
        ("paged_decode_alibi", "alibi_slopes", lambda x: x.at[1].multiply(1.001)),
        ("paged_extend_alibi_and_soft_cap", "alibi_slopes", lambda x: -x),
        ("paged_decode_verify_sinks_and_window", "sinks", lambda x: x + 0.1),
        ("mla_decode_verify_window", "sinks", lambda x: x.at[0].add(1e-4)),
        ("ragged_extend_fp8", "v_scale", lambda x: x * 1.02),
        ("paged_extend_fp8_queries", "q_scale", lambda x: x[::-1]),
        ("paged_decode_fp8_e5m2_layers", "k_scale", lambda x: x[jnp.array([0, 2, 1])]),
        ("mla_extend_fp8_queries", "kv_scale", lambda x: x * 1.02),
        ("mla_decode_tree", "custom_mask", lambda x: x | True),
        ("paged_extend_tree", "q_positions", lambda x: x + 1),
    ],
)
def test_assert_close_rejects_another_argument(name, argument, change):
    (case,) = by_name(name)
    inputs = build(case)
    other = inputs.kwargs | {argument: change(inputs.kwargs[argument])}
    out, lse = oracle(case, Inputs(inputs.args, other))
    with pytest.raises(AssertionError, match=name):
        assert_close(case, inputs, *as_answer(case, out, lse))


def test_assert_close_rejects_a_wrong_output_with_the_right_lse():
    (case,) = by_name("paged_decode_bfloat16")
    inputs = build(case)
    out, lse = oracle(case, inputs)
    with pytest.raises(AssertionError, match="out in units"):
        assert_close(case, inputs, *as_answer(case, out * 1.02, lse))
