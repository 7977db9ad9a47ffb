"""Hopper's kernel of routing and of the order of rows, under the interpreter, against the formulas of both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Routing
from jattn_kernels.lowering.expert_groups import group_by_expert
from jattn_kernels.lowering.routing import routed
from jattn_kernels.mosaic.sm90.experts import choice, route
from tests.kernels.harness.expert_cases import ExpertCase, build
from tests.kernels.harness.interpreter import interpreted

EXPERTS, BLOCK_ROWS = 16, 8


def random_logits(tokens):
    """Of every other token, neighbours have equal logits, and of every fourth all."""
    logits = np.random.default_rng(0).standard_normal((tokens, EXPERTS)).astype(np.float32)
    logits[::2, 1::2] = logits[::2, ::2]
    logits[::4] = 0.5
    return jnp.asarray(logits)


def assert_groups(found, expected):
    """Equal, in what has a meaning: tiles that there are, slots that a row has."""
    np.testing.assert_array_equal(found.slots, expected.slots)
    np.testing.assert_array_equal(found.num_tiles, expected.num_tiles)
    tiles = int(expected.num_tiles[0])
    np.testing.assert_array_equal(found.work[:tiles], expected.work[:tiles])
    owned = np.unique(expected.slots[expected.slots >= 0])
    np.testing.assert_array_equal(found.sources[owned], expected.sources[owned])


SCORINGS = {
    "softmax": {"scoring": "softmax"},
    "softmax_normalised": {"scoring": "softmax", "normalised": True},
    "sigmoid": {"scoring": "sigmoid", "scaling_factor": 2.5, "normalised": True},
    "softmax_of_chosen": {"scoring": "softmax_of_chosen"},
}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("tokens", "scoring", "biased", "rows_of_choices"),
    [
        (3, "softmax", False, False),
        (70, "sigmoid", True, True),
        (3, "softmax_of_chosen", False, True),
        (11, "softmax", True, False),
        slow(70, "softmax_normalised", False, False),
        slow(3, "sigmoid", False, False),
        slow(70, "softmax_of_chosen", False, False),
        slow(3, "softmax_normalised", True, True),
    ],
)
def test_route_and_group_is_routing_then_grouping(tokens, scoring, biased, rows_of_choices):
    routing = Routing(num_experts=EXPERTS, per_token=3, **SCORINGS[scoring])
    bias = jnp.asarray(np.tile([0.3, 0.3, -0.2, 0.1], EXPERTS // 4), jnp.float32) if biased else None
    logits, facts = random_logits(tokens), {"block_rows": BLOCK_ROWS, "rows_of_choices": rows_of_choices}
    assert route.fits(tokens, EXPERTS)
    assert choice.chooses(routing, is_biased=biased)
    run = functools.partial(route.route_and_group, routing, num_tokens=tokens, **facts)
    with interpreted():
        weights, groups = jax.jit(run)(route.RouteOperands(logits=logits, bias=bias))
    expected_weights, chosen = routed(logits, routing, bias)
    np.testing.assert_allclose(weights.T, expected_weights, rtol=1e-5)
    assert_groups(groups, group_by_expert(chosen, EXPERTS, **facts))


@pytest.mark.parametrize(
    ("tokens", "scoring", "biased"),
    [(70, "softmax_normalised", False), (3, "sigmoid", True), slow(130, "softmax", True), slow(70, "softmax", False)],
)
def test_choose_experts_is_routing(tokens, scoring, biased):
    routing = Routing(num_experts=EXPERTS, per_token=3, **SCORINGS[scoring])
    bias = jnp.asarray(np.tile([0.3, 0.3, -0.2, 0.1], EXPERTS // 4), jnp.float32) if biased else None
    logits = random_logits(tokens)
    with interpreted():
        weights, chosen = jax.jit(functools.partial(choice.choose_experts, routing))(logits, bias)
    expected_weights, expected = routed(logits, routing, bias)
    np.testing.assert_array_equal(chosen.T, expected)
    np.testing.assert_allclose(weights.T, expected_weights, rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "who", "rows_of_choices"),
    [
        (3, "any", True),
        (70, "strays", False),
        slow(70, "strays", True),
        slow(128, "same", False),
        slow(9, "twice", False),
    ],
)
def test_group_chosen_is_grouping(tokens, who, rows_of_choices):
    case = ExpertCase(name="choice", tokens=tokens, experts=EXPERTS, hidden=8, units=8, choice=who)
    chosen, routing = build(case).args[2], Routing(num_experts=EXPERTS, per_token=case.per_token)
    facts = {"block_rows": BLOCK_ROWS, "rows_of_choices": rows_of_choices}
    with interpreted():
        groups = jax.jit(functools.partial(route.group_chosen, routing, **facts))(chosen.T)
    assert_groups(groups, group_by_expert(chosen, EXPERTS, **facts))


def test_groups_have_a_slot_for_each_row_and_tiles_for_each_slot():
    """What both ways of grouping have to give, without either's arithmetic."""
    chosen = np.asarray(
        build(ExpertCase(name="g", tokens=300, per_token=3, choice="strays", hidden=8, units=8)).args[2]
    )
    groups = jax.tree.map(np.asarray, group_by_expert(jnp.asarray(chosen), 8, BLOCK_ROWS))
    is_expert = (chosen >= 0) & (chosen < 8)
    np.testing.assert_array_equal(groups.slots.T >= 0, is_expert)
    slots = groups.slots.T[is_expert]
    assert len(set(slots.tolist())) == len(slots)
    np.testing.assert_array_equal(groups.sources[slots], np.nonzero(is_expert)[0])
    expert_of = dict(zip(slots.tolist(), chosen[is_expert].tolist(), strict=True))
    done = {}
    for expert, first, rows in groups.work[: groups.num_tiles[0]].tolist():
        assert 0 < rows <= BLOCK_ROWS
        assert first % 8 == 0
        done |= dict.fromkeys(range(first, first + rows), expert)
    assert done == expert_of
