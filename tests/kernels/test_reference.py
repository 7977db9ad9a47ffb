"""The oracle against brute force in plain Python, and against examples worked by hand."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jattn_kernels import reference
from jattn_kernels.spec import AttentionSpec
from tests.kernels.harness.brute_force import BruteForce
from tests.kernels.harness.case import UNUSED_PAGES, tree_path
from tests.kernels.harness.case_table import CASES, Case, build, by_name, oracle, random_cases

# float64 sums in two orders.
ATOL = 1e-11


def assert_brute_force_agrees(case: Case, seed: int = 0) -> None:
    inputs = build(case, seed)
    out, lse = oracle(case, inputs)
    expected_out, expected_lse = BruteForce(case, inputs).run()
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=ATOL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_oracle_equals_brute_force(case):
    assert_brute_force_agrees(case)


@settings(max_examples=40)
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


def one_row(q, k, v, *, spec=None, q_start=0, kv_start=0, **options):
    """One query of one head over a few keys, given as lists."""
    q, k, v = (np.asarray(x, np.float64)[:, None] for x in ([q], k, v))
    spec = spec or AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=q.shape[-1], v_head_dim=v.shape[-1])
    places = {"q_start": np.array([q_start]), "kv_start": np.array([kv_start])}
    bounds = np.array([0, 1]), np.array([0, len(k)])
    out, lse = reference.ragged_extend(q, k, v, *bounds, spec=spec, **places, **options, return_lse=True)
    return out[0, 0].tolist(), float(lse[0, 0])


@pytest.mark.parametrize(
    ("causal", "q_start", "biases"),
    [(True, 2, [-1.0, -0.5, 0.0]), (False, 1, [-0.5, 0.0, -0.5]), (False, -3, [-1.5, -2.0, -2.5])],
)
def test_alibi_by_hand(causal, q_start, biases):
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, causal=causal)
    slopes = np.array([0.5])
    _, lse = one_row([0.0], [[1.0]] * 3, [[1.0]] * 3, spec=spec, q_start=q_start, alibi_slopes=slopes)
    np.testing.assert_allclose(lse, math.log(sum(map(math.exp, biases))), rtol=0, atol=ATOL)


def test_alibi_comes_after_the_cap():
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, sm_scale=2.0, logits_soft_cap=3.0)
    _, lse = one_row([3.0], [[1.0]], [[1.0]], spec=spec, q_start=10, alibi_slopes=np.array([0.25]))
    np.testing.assert_allclose(lse, 3.0 * math.tanh(2.0) - 2.5, rtol=0, atol=ATOL)


def test_sink_takes_its_share_of_the_output_and_none_of_the_lse():
    options = {"q_start": 1, "sinks": np.log([2.0])}
    out, lse = one_row([0.0], [[1.0]] * 2, [[4.0], [8.0]], **options)
    np.testing.assert_allclose(out, [(4 + 8) / (2 + 2)], rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, math.log(2), rtol=0, atol=ATOL)


@pytest.mark.parametrize("sink", [0.0, 50.0, -math.inf])
def test_sink_leaves_an_empty_row_empty(sink):
    assert one_row([0.0], [[1.0]], [[4.0]], q_start=-1, sinks=np.array([sink])) == ([0.0], -math.inf)


def test_sink_of_minus_infinity_is_none():
    whole = one_row([1.0], [[1.0], [2.0]], [[4.0], [8.0]], q_start=1)
    np.testing.assert_allclose(
        np.hstack(one_row([1.0], [[1.0], [2.0]], [[4.0], [8.0]], q_start=1, sinks=np.array([-np.inf]))),
        np.hstack(whole),
        rtol=0,
        atol=ATOL,
    )


def test_rope_turns_halves_by_a_right_angle():
    # At position pi/2 * scale the first pair (x0, x2) turns by a right angle and the second, of a far base, stays.
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=4, rope_theta=1e16, rope_scale=2 / math.pi)
    _, lse = one_row([1.0, 2.0, 3.0, 4.0], [[5.0, 6.0, 7.0, 8.0]], [[1.0] * 4], spec=spec, q_start=1)
    turned = [-3.0, 2.0, 1.0, 4.0]
    expected = sum(a * b for a, b in zip(turned, [5.0, 6.0, 7.0, 8.0], strict=True)) / 2
    np.testing.assert_allclose(lse, expected, rtol=0, atol=1e-6)  # the second pair's angle is 1e-8 of the first's


def test_rope_sees_distances_only():
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=4, rope_theta=1e4)
    rows = [1.0, 2.0, 3.0, 4.0], [[5.0, 6.0, 7.0, 8.0], [0.5, 1.0, -1.0, 2.0]], [[1.0] * 4] * 2
    near = one_row(*rows, spec=spec, q_start=1)[1]
    far = one_row(*rows, spec=spec, q_start=1001, kv_start=1000)[1]
    assert abs(near - one_row(*rows, spec=spec, q_start=5)[1]) > 0.1
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-9)


def test_fp8_scales_stand_for_the_numbers_that_were_stored():
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, logits_soft_cap=3.0)
    scales = {"q_scale": np.float32(2), "k_scale": np.float32([3]), "v_scale": np.float32(0.5)}
    out, lse = one_row([1.5], [[0.5]], [[4.0]], spec=spec, **scales)
    assert out == [2.0]
    np.testing.assert_allclose(lse, 3 * math.tanh(2 * 3 * 1.5 * 0.5 / 3), rtol=0, atol=ATOL)


@pytest.mark.parametrize("case", by_name("paged_decode_tree", "mla_decode_tree"), ids=lambda case: case.name)
def test_tree_node_sees_what_its_branch_would_as_a_chain(case):
    inputs = build(case)
    out, lse = oracle(case, inputs)
    tree, last = BruteForce(case, inputs), len(case.tree)
    for request, node in itertools.product(range(len(case.kv_lens)), range(last)):
        # The branch alone, as a chain: its keys are those of the prefix and of the path.
        prefix = case.kv_lens[request] - last
        keys = [*range(prefix), *(prefix + step for step in tree_path(case.tree, node))]
        query = tree.query(request, node, 0)
        weights = [
            math.exp(case.spec.scale * sum(a * b for a, b in zip(query, tree.key(request, s, 0), strict=True)))
            for s in keys
        ]
        expected = sum(w * tree.value(request, s, 0)[0] for w, s in zip(weights, keys, strict=True)) / sum(weights)
        np.testing.assert_allclose(out[request, node, 0, 0], expected, rtol=0, atol=ATOL)
        np.testing.assert_allclose(lse[request, node, 0], math.log(sum(weights)), rtol=0, atol=ATOL)
        assert tree.position(request, node) == len(keys) - 1


def test_mla_is_attention_whose_values_begin_its_keys():
    (case,) = by_name("mla_extend_plain")
    inputs = build(case)
    q_nope, q_pe, latent, *rest = inputs.args
    pages = latent[:, :, None]
    plain = reference.paged_extend(
        jnp.concatenate([q_nope, q_pe], axis=-1), pages, pages[..., :16], *rest, **inputs.kwargs, return_lse=True
    )
    for one, other in zip(oracle(case, inputs), plain, strict=True):
        np.testing.assert_array_equal(one, other)


def test_oracle_names_an_argument_that_it_does_not_know():
    with pytest.raises(TypeError, match="sink_logits"):
        one_row([0.0], [[1.0]], [[1.0]], sink_logits=np.zeros(1))


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


def test_build_leaves_nan_wherever_no_request_owns_the_memory():
    (case,) = by_name("paged_decode_lengths")
    _, k_pages, v_pages, page_table, _ = build(case).args
    for pages in (k_pages, v_pages):
        finite_rows = np.isfinite(np.asarray(pages)).all(axis=(-2, -1))
        assert finite_rows[0].all()
        assert finite_rows[1:].sum() == sum(case.kv_lens)
        assert len(finite_rows) == 1 + np.count_nonzero(np.asarray(page_table)) + UNUSED_PAGES
