"""The oracle against brute force in plain Python, and against examples worked by hand."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jattn_kernels import reference
from jattn_kernels.spec import AttentionSpec
from tests.kernels.brute_force import BruteForce
from tests.kernels.case import UNUSED_PAGES
from tests.kernels.cases import CASES, Case, Inputs, assert_close, build, oracle, random_cases

# float64 sums in two orders.
ATOL = 1e-11


def by_name(*names: str) -> list[Case]:
    found = [case for case in CASES if case.name in names]
    assert len(found) == len(names)
    return found


def assert_brute_force_agrees(case: Case, seed: int = 0) -> None:
    inputs = build(case, seed)
    out, lse = oracle(case, inputs)
    expected_out, expected_lse = BruteForce(case, inputs).run()
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=ATOL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_oracle_equals_brute_force(case):
    assert_brute_force_agrees(case)


@settings(max_examples=40, deadline=None)
@given(case=random_cases())
def test_oracle_equals_brute_force_on_random_cases(case):
    assert_brute_force_agrees(case, seed=1)


def visible_counts(q_lens, kv_lens, *, operation="ragged_extend", **fields) -> list[int]:
    """Keys that each query sees: with zero queries all logits are 0, so lse is the logarithm of their number."""
    arguments = {name: fields.pop(name) for name in ("q_start", "kv_start") if name in fields}
    custom_mask, q_positions = fields.pop("custom_mask", None), fields.pop("q_positions", None)
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=4, **fields)
    case = Case(name="", operation=operation, spec=spec, q_lens=q_lens, kv_lens=kv_lens, page_size=2, **arguments)
    inputs = build(case)
    extra = {"custom_mask": custom_mask, "q_positions": q_positions}
    kwargs = inputs.kwargs | {name: np.array(value) for name, value in extra.items() if value is not None}
    call = getattr(reference, operation)
    _, lse = call(jnp.zeros_like(inputs.args[0]), *inputs.args[1:], **kwargs, return_lse=True)
    return np.exp(lse).round(9).flatten().tolist()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param({"q_lens": (3,), "kv_lens": (5,)}, [3, 4, 5], id="causal is bottom-right"),
        pytest.param({"q_lens": (3,), "kv_lens": (5,), "causal": False}, [5, 5, 5], id="not causal"),
        pytest.param({"q_lens": (4, 1), "kv_lens": (2, 1)}, [0, 0, 1, 2, 1], id="more queries than keys"),
        pytest.param({"q_lens": (2,), "kv_lens": (0,), "causal": False}, [0, 0], id="no keys"),
        pytest.param({"q_lens": (5,), "kv_lens": (5,), "window_left": 2}, [1, 2, 3, 3, 3], id="window counts the left"),
        pytest.param({"q_lens": (3,), "kv_lens": (9,), "window_left": 0}, [1, 1, 1], id="window 0 is the own key"),
        pytest.param(
            {"q_lens": (5,), "kv_lens": (5,), "causal": False, "window_left": 1, "window_right": 2},
            [3, 4, 4, 3, 2],
            id="window of both sides",
        ),
        pytest.param({"q_lens": (9,), "kv_lens": (9,), "chunk_size": 4}, [1, 2, 3, 4, 1, 2, 3, 4, 1], id="chunk"),
        pytest.param(
            {"q_lens": (4,), "kv_lens": (4,), "chunk_size": 4, "kv_start": (2,)},
            [1, 2, 1, 2],
            id="chunks lie at absolute positions",
        ),
        pytest.param(
            {"q_lens": (4,), "kv_lens": (4,), "chunk_size": 4, "q_start": (-2,), "causal": False},
            [0, 0, 4, 4],
            id="a chunk before 0 is another chunk",
        ),
        pytest.param(
            {"q_lens": (2,), "kv_lens": (6,), "kv_start": (10,), "window_left": 3},
            [4, 4],
            id="kv_start moves the queries too",
        ),
        pytest.param(
            {"q_lens": (3,), "kv_lens": (6,), "kv_start": (10,), "q_start": (16,), "window_left": 3},
            [3, 2, 1],
            id="a window over a prefix part",
        ),
        pytest.param(
            {"q_lens": (3,), "kv_lens": (6,), "kv_start": (10,), "q_start": (8,)}, [0, 0, 1], id="queries before keys"
        ),
        pytest.param(
            {"q_lens": (2, 1), "kv_lens": (3, 2), "custom_mask": np.ones(10) == [1, 1, 1, 0, 0, 1, 0, 0, 1, 1]},
            [3, 1, 0],
            id="custom mask replaces causal, blocks follow each other",
        ),
        pytest.param(
            {"q_lens": (2,), "kv_lens": (4,), "custom_mask": [True] * 8, "window_left": 1},
            [3, 2],
            id="custom mask keeps the window",
        ),
        pytest.param({"q_lens": (3,), "kv_lens": (6,), "q_positions": [3, 4, 4]}, [4, 5, 5], id="shared positions"),
    ],
)
def test_query_sees_as_many_keys_as_the_rules_say(arguments, expected):
    assert visible_counts(**arguments) == expected


@pytest.mark.parametrize(("kv_len", "expected"), [(4, 4), (5, 1), (8, 4)])
def test_decode_in_a_chunk_sees_its_part_of_the_chunk(kv_len, expected):
    assert visible_counts((1,), (kv_len,), operation="paged_decode", chunk_size=4) == [expected]


def test_decode_mask_has_no_block_for_padded_rows():
    mask = [True, False, True, True, True, False]
    counts = visible_counts((1,) * 4, (3, 0, 2, 1), operation="paged_decode", custom_mask=mask)
    assert counts == [2, 0, 2, 0]


def test_window_zero_returns_the_own_value():
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16, window_left=0)
    case = Case(name="", operation="ragged_extend", spec=spec, q_lens=(5,), kv_lens=(5,))
    inputs = build(case)
    out, _ = oracle(case, inputs)
    np.testing.assert_allclose(out, np.asarray(inputs.args[2])[:5], rtol=0, atol=ATOL)


def test_soft_cap_comes_after_the_scale():
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, sm_scale=2.0, logits_soft_cap=3.0)
    three, one = np.full((1, 1, 1), 3.0), np.ones((1, 1, 1))
    bounds = np.array([0, 1])
    _, lse = reference.ragged_extend(three, one, one, bounds, bounds, spec=spec, return_lse=True)
    np.testing.assert_allclose(lse, 3.0 * math.tanh(2.0), rtol=0, atol=ATOL)


@pytest.mark.parametrize("case", by_name("paged_decode_verify", "paged_extend_padding"), ids=lambda case: case.name)
def test_padding_is_inert(case):
    out, lse = oracle(case, build(case))
    first = len(case.q_lens) if case.operation == "paged_decode" else sum(case.q_lens)
    assert len(out) > first
    assert (out[first:] == 0).all()
    assert np.isneginf(lse[first:]).all()


def test_merge_of_parts_by_hand():
    out, lse = reference.merge_state(np.full((1, 1, 2), 1.0), np.log([[3.0]]), np.full((1, 1, 2), 5.0), np.log([[1.0]]))
    np.testing.assert_allclose(out, 2.0, rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, math.log(4.0), rtol=0, atol=ATOL)


def test_merge_with_an_empty_part_is_the_other_part():
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((3, 2, 4)), rng.standard_normal((3, 2))
    nothing, empty = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    for merged in (reference.merge_state(out, lse, nothing, empty), reference.merge_state(nothing, empty, out, lse)):
        np.testing.assert_array_equal(merged[0], out)
        np.testing.assert_array_equal(merged[1], lse)


def test_merge_of_empty_parts_is_empty():
    out, lse = reference.merge_states(np.zeros((3, 2, 1, 4)), np.full((3, 2, 1), -np.inf))
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("rules", [{}, {"window_left": 4}, {"chunk_size": 4}, {"logits_soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("split", [0, 1, 6, 11])
def test_merge_of_parts_through_kv_start_is_the_whole(split, rules):
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, **rules)
    case = Case(name="", operation="ragged_extend", spec=spec, q_lens=(5,), kv_lens=(11,))
    inputs = build(case)
    q, k, v, cu_q_lens, _ = inputs.args
    q_start = np.array([6])

    def part(first, last):
        return reference.ragged_extend(
            q,
            k[first:last],
            v[first:last],
            cu_q_lens,
            np.array([0, last - first]),
            spec=spec,
            q_start=q_start,
            kv_start=np.array([first]),
            return_lse=True,
        )

    out, lse = reference.merge_state(*part(0, split), *part(split, 11))
    whole_out, whole_lse = oracle(case, inputs)
    np.testing.assert_allclose(out, whole_out, rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=ATOL)


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
    ],
)
def test_assert_close_rejects_another_rule(name, wrong):
    (case,) = by_name(name)
    inputs = build(case)
    other = dataclasses.replace(case.spec, **wrong)
    out, lse = oracle(case, Inputs(inputs.args, inputs.kwargs | {"spec": other}))
    with pytest.raises(AssertionError, match=name):
        assert_close(case, inputs, *as_answer(case, out, lse))


def test_assert_close_rejects_a_wrong_output_with_the_right_lse():
    (case,) = by_name("paged_decode_bfloat16")
    inputs = build(case)
    out, lse = oracle(case, inputs)
    with pytest.raises(AssertionError, match="out in units"):
        assert_close(case, inputs, *as_answer(case, out * 1.02, lse))


def test_build_leaves_nan_wherever_no_request_owns_the_memory():
    (case,) = by_name("paged_decode_lengths")
    _, k_pages, v_pages, page_table, _ = build(case).args
    for pages in (k_pages, v_pages):
        finite_rows = np.isfinite(np.asarray(pages)).all(axis=(-2, -1))
        assert finite_rows[0].all()
        assert finite_rows[1:].sum() == sum(case.kv_lens)
        assert len(finite_rows) == 1 + np.count_nonzero(np.asarray(page_table)) + UNUSED_PAGES
