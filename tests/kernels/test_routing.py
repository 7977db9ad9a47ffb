"""Routing against the oracle, ties and groups included, and the sentences for what does not fit."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Routing, route
from jattn_kernels.reference import route as exact_route

SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen")
GROUPINGS = {
    "one_group": {},
    "all_groups": {"num_groups": 4, "groups_per_token": 4},
    "best": {"num_groups": 4, "groups_per_token": 2},
    "two_best": {"num_groups": 4, "groups_per_token": 2, "group_score": "two_best"},
    "all_by_two_best": {"num_groups": 4, "groups_per_token": 4, "group_score": "two_best"},
    "one_of_many": {"num_groups": 3, "groups_per_token": 1, "group_score": "two_best"},
}


def case(scoring="softmax", grouping="one_group", *, per_token=3, **facts):
    facts = {"scoring": scoring, "normalised": scoring == "sigmoid", **GROUPINGS[grouping], **facts}
    return Routing(num_experts=12, per_token=per_token, **facts)


def checked(**changes):
    """A routing made past the type checker of the tests, which would be first to speak."""
    routing = Routing(num_experts=12, per_token=3)
    for name, value in changes.items():
        object.__setattr__(routing, name, value)
    routing.__post_init__()
    return routing


def random_logits(routing, *, tokens=40, seed=0):
    """Of every other token, experts have equal logits: neighbours, and all those of two groups."""
    rng = np.random.default_rng(seed)
    logits = (2 * rng.standard_normal((tokens, routing.num_experts))).astype(np.float32)
    size = routing.group_size
    logits[::4, 1::2] = logits[::4, ::2]
    if routing.num_groups > 1:
        logits[1::4, -size:] = logits[1::4, :size]
    return jnp.asarray(logits)


def assert_routed(logits, routing, bias=None):
    weights, chosen = jax.jit(route, static_argnames="routing")(logits, routing=routing, bias=bias)
    expected_weights, expected = exact_route(logits, routing, bias=bias)
    assert (weights.dtype, chosen.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(chosen, expected)
    # An exponential, a sum of 12, a division, a sum of 3, a division and a factor, of logits below 8.
    rounding = (8 + 12 + 3 + 4) * np.finfo(np.float32).eps
    np.testing.assert_allclose(weights, expected_weights, rtol=rounding, atol=0)
    return weights, chosen


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_routing_is_the_oracles(scoring, grouping, biased):
    routing = case(scoring, grouping, scaling_factor=2.5)
    bias = np.repeat(np.float32([0.3, -0.2, 0.1]), 4) if biased else None
    if biased and routing.num_groups == 4:  # so that equal groups stay equal
        bias = np.tile(np.float32([0.3, -0.2, 0.1]), 4)
    assert_routed(random_logits(routing), routing, bias)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_shared_experts_come_first_with_weights_of_one(scoring):
    routing = case(scoring, scaling_factor=2.5, shared=2)
    weights, chosen = assert_routed(random_logits(routing), routing)
    assert (routing.choices, routing.all_experts) == (5, 14)
    np.testing.assert_array_equal(chosen[:, :2], np.tile([12, 13], (len(chosen), 1)))
    np.testing.assert_array_equal(weights[:, :2], 1.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("per_token", [1, 6])
def test_other_numbers_of_experts_a_token(per_token, seed):
    for grouping in ("one_group", "best", "two_best"):
        routing = case("sigmoid", grouping, per_token=per_token)
        assert_routed(random_logits(routing, seed=seed), routing)


def test_normalised_weights_have_a_sum_of_the_factor():
    for scoring in ("softmax", "sigmoid"):
        weights, _ = assert_routed(
            random_logits(routing := case(scoring, normalised=True, scaling_factor=2.5)), routing
        )
        np.testing.assert_allclose(np.sum(weights, axis=-1), 2.5, rtol=1e-6)


def test_softmax_of_chosen_is_the_softmax_normalised():
    logits = random_logits(case())
    weights, chosen = route(logits, case("softmax_of_chosen"))
    others, same = route(logits, case(normalised=True))
    np.testing.assert_array_equal(chosen, same)
    np.testing.assert_allclose(weights, others, rtol=1e-6)


def test_equal_logits_choose_the_lower_numbers():
    for grouping in GROUPINGS:
        for value in (0.0, 1.5):
            _, chosen = route(jnp.full((2, 12), value), case("sigmoid", grouping))
            assert chosen.tolist() == [[0, 1, 2]] * 2
    signs = jnp.where(jnp.arange(12) % 2 == 0, -0.0, 0.0)
    assert route(signs[None], case())[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_large_logits_still_choose_the_largest(scoring):
    logits = jnp.arange(12.0)[None] * 50 - 100  # of which the sigmoids are 1, and the probabilities 0
    for grouping in ("one_group", "best"):
        assert route(logits, case(scoring, grouping))[1].tolist() == [[11, 10, 9]]


def test_bias_is_for_the_choice_alone():
    logits = jnp.zeros((1, 12)).at[0, 5].set(2.0)
    weights, chosen = route(logits, case("sigmoid", normalised=False), bias=jnp.zeros(12).at[7].set(4.0))
    assert chosen.tolist() == [[7, 5, 0]]
    np.testing.assert_allclose(weights, [[0.5, jax.nn.sigmoid(2.0), 0.5]], rtol=1e-6)


def test_no_expert_of_another_group_is_chosen_whatever_is_left():
    logits = jnp.full((1, 12), -jnp.inf).at[0, 4].set(1.0)
    for grouping in ("best", "two_best"):
        routing = case("softmax", grouping, per_token=6)
        weights, chosen = route(logits, routing)
        assert chosen.tolist() == [[4, 0, 1, 2, 3, 5]]
        assert weights.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]


def test_sigmoids_that_are_all_zero_have_weights_of_zero():
    weights, _ = route(jnp.full((1, 12), -200.0), case("sigmoid", normalised=True))
    assert weights.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_logits_are_routed_in_float32(dtype):
    logits = jnp.asarray(random_logits(case())).astype(dtype)
    assert_routed(logits, case(normalised=True))


def test_token_that_is_not_a_number_harms_no_other():
    routing = case("sigmoid", "two_best")
    logits = random_logits(routing)
    weights, chosen = route(logits.at[3].set(jnp.nan), routing)
    assert np.isnan(weights[3]).all()
    assert set(chosen[3].tolist()) <= set(range(12))
    for with_it, without in zip((weights, chosen), route(logits, routing), strict=True):
        np.testing.assert_array_equal(np.delete(with_it, 3, axis=0), np.delete(without, 3, axis=0))


def test_numpy_arrays_are_taken_and_left_alone():
    routing, logits, bias = case("softmax_of_chosen"), np.asarray(random_logits(case())), np.ones(12, np.float32)
    before = logits.copy()
    weights, chosen = inspect.unwrap(route)(logits, routing, bias=bias)
    np.testing.assert_array_equal(logits, before)
    for found, expected in zip((weights, chosen), route(jnp.asarray(logits), routing), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_no_tokens_have_no_experts():
    for grouping in GROUPINGS:
        weights, chosen = route(jnp.zeros((0, 12)), case("sigmoid", grouping))
        assert weights.shape == chosen.shape == (0, 3)


def test_routing_is_hashable():
    assert len({case(), case(), case(per_token=2)}) == 2


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"num_experts": 0}, "`num_experts` must be a whole number of at least 1. Got num_experts=0"),
        ({"per_token": 1.0}, "`per_token` must be a whole number of at least 1. Got per_token=1.0"),
        ({"num_groups": True}, "`num_groups` must be a whole number of at least 1. Got num_groups=True"),
        ({"shared": -1}, "`shared` must be a whole number of at least 0. Got shared=-1"),
        ({"shared": 1.0}, "`shared` must be a whole number of at least 0. Got shared=1.0"),
        ({"groups_per_token": 0}, "`groups_per_token` must be a whole number of at least 1"),
        ({"per_token": 13}, "`per_token` must be at most `num_experts`. Got 13 of 12"),
        ({"scoring": "tanh"}, "`scoring` must be one of softmax, sigmoid, softmax_of_chosen. Got 'tanh'"),
        ({"group_score": "mean"}, "`group_score` must be one of best, two_best. Got 'mean'"),
        ({"normalised": 1}, "`normalised` must be True or False. Got normalised=1"),
        ({"scoring": "softmax_of_chosen", "normalised": True}, "`normalised` must be False with 'softmax_of_chosen'"),
        ({"scaling_factor": 0.0}, "`scaling_factor` must be a finite number above 0. Got scaling_factor=0.0"),
        ({"scaling_factor": float("inf")}, "`scaling_factor` must be a finite number above 0"),
        ({"scaling_factor": "2"}, "`scaling_factor` must be a finite number above 0. Got scaling_factor='2'"),
        ({"num_groups": 5}, "`num_groups` must divide `num_experts`. Got 5 groups of 12 experts"),
        ({"num_groups": 4, "groups_per_token": 5}, "`groups_per_token` must be at most `num_groups`. Got 5 of 4"),
        ({"num_groups": 6}, "`per_token` must be at most the experts in `groups_per_token` groups. Got 3 of 2"),
        (
            {"num_groups": 12, "groups_per_token": 3, "group_score": "two_best"},
            "`group_score` may be 'two_best' only with two experts a group. Got 12 groups of one",
        ),
    ],
)
def test_facts_that_do_not_fit_are_refused(facts, message):
    with pytest.raises(ValueError, match=message):
        checked(**facts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": [[0.0]]}, "`logits` must be an array of JAX or NumPy. Got a list"),
        ({"logits": np.zeros(12, np.float32)}, r"`logits` must be \[T, E\]. Got logits.shape=\(12,\)"),
        ({"logits": np.zeros((2, 12), np.int32)}, "`logits` must be one of float32, .* Got logits.dtype=int32"),
        ({"logits": np.zeros((2, 8), np.float32)}, r"`logits` must have a column an expert, 12. Got .*\(2, 8\)"),
        ({"routing": None}, "`routing` must be a Routing. Got None"),
        ({"bias": 0.5}, "`bias` must be an array of JAX or NumPy. Got a float"),
        ({"bias": np.zeros(12, np.int32)}, "`bias` must be one of float32, .* Got bias.dtype=int32"),
        ({"bias": np.zeros(8, np.float32)}, r"`bias` must have a number an expert, \[12\]. Got bias.shape=\(8,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    unchecked = inspect.unwrap(route)  # as users have it, whose types nobody checks
    with pytest.raises(ValueError, match=message):
        unchecked(**{"logits": np.zeros((2, 12), np.float32), "routing": case(), **arguments})
