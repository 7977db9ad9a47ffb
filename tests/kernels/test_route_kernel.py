"""Hopper's kernel of routing and of the order of rows, under the interpreter, against the formulas of both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Routing
from jattn_kernels.lowering.expert_groups import group_by_expert
from jattn_kernels.lowering.routing import routed
from jattn_kernels.mosaic.sm90.experts import choice, route, route_few
from tests.kernels.harness.expert_cases import ExpertCase, build
from tests.kernels.harness.interpreter import interpreted
from tests.often import often_together, slow

EXPERTS, BLOCK_ROWS = 16, 8

compiled_routed = jax.jit(routed, static_argnums=1)
compiled_grouping = jax.jit(group_by_expert, static_argnums=(1, 2), static_argnames=("block_rows", "rows_of_choices"))


def random_logits(tokens, experts=EXPERTS):
    """Of every other token, neighbours have equal logits, and of every fourth all."""
    logits = np.random.default_rng(0).standard_normal((tokens, experts)).astype(np.float32)
    logits[::2, 1::2] = logits[::2, ::2]
    logits[::4] = 0.5
    return jnp.asarray(logits)


def assert_groups(found, expected):
    """Equal, in what has a meaning: tiles that there are, slots that a row has."""
    found, expected = (jax.tree.map(np.asarray, groups) for groups in (found, expected))
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


ROUTED = [
    (3, "softmax", False, False),
    (70, "sigmoid", True, True),
    (3, "softmax_of_chosen", False, True),
    (11, "softmax", True, False),
    (70, "softmax_normalised", False, False),
    (3, "sigmoid", False, False),
    (70, "softmax_of_chosen", False, False),
    (3, "softmax_normalised", True, True),
]


@pytest.mark.parametrize(
    ("tokens", "scoring", "biased", "rows_of_choices", "shared"),
    often_together(
        [(*case, shared) for case in ROUTED for shared in (0, 2)],
        [(70, "sigmoid", True, True, 2), (11, "softmax", True, False, 0)],
    ),
)
def test_route_and_group_is_routing_then_grouping(tokens, scoring, biased, rows_of_choices, shared):
    routing = Routing(num_experts=EXPERTS, per_token=3, shared=shared, **SCORINGS[scoring])
    bias = jnp.asarray(np.tile([0.3, 0.3, -0.2, 0.1], EXPERTS // 4), jnp.float32) if biased else None
    logits, facts = random_logits(tokens), {"block_rows": BLOCK_ROWS, "rows_of_choices": rows_of_choices}
    assert route.fits(tokens, EXPERTS, shared)
    assert choice.chooses(routing, is_biased=biased)
    run = functools.partial(route.route_and_group, routing, num_tokens=tokens, **facts)
    with interpreted():
        weights, groups = jax.jit(run)(route.RouteOperands(logits=logits, bias=bias))
    expected_weights, chosen = compiled_routed(logits, routing, bias)
    np.testing.assert_allclose(np.asarray(weights).T, expected_weights, rtol=1e-5)
    assert_groups(groups, compiled_grouping(chosen, EXPERTS + shared, **facts))


FEW_TOKENS = [
    (1, 128, 8, "softmax_normalised", False, False),
    (8, 128, 8, "softmax", False, True),
    (6, 64, 8, "sigmoid", True, False),
    (16, 32, 4, "softmax_of_chosen", False, False),
    (3, 32, 12, "softmax", True, True),
    (64, 64, 1, "sigmoid", False, False),
]
FACTS = ("tokens", "experts", "per_token", "scoring", "biased", "rows_of_choices")


def assert_few_are_routed(tokens, experts, per_token, scoring, biased, rows_of_choices, shared=0):
    routing = Routing(num_experts=experts, per_token=per_token, shared=shared, **SCORINGS[scoring])
    bias = jnp.asarray(np.tile([0.3, 0.3, -0.2, 0.1], experts // 4), jnp.float32) if biased else None
    logits, facts = random_logits(tokens, experts), {"block_rows": BLOCK_ROWS, "rows_of_choices": rows_of_choices}
    # Of halves each, and rows of no token that are not numbers.
    halves = np.stack([np.asarray(logits) / 2] * 2)
    padding = ((0, 0), (0, route_few.token_rows(tokens) - tokens), (0, 0))
    parts = np.pad(halves, padding, constant_values=np.nan)
    assert route_few.fits(routing, tokens)
    run = functools.partial(route_few.route_and_group_few, routing, num_tokens=tokens, **facts)
    weights, groups = jax.jit(run)(parts, bias)
    expected_weights, chosen = compiled_routed(logits, routing, bias)
    np.testing.assert_allclose(np.asarray(weights).T, expected_weights, rtol=1e-5)
    assert_groups(groups, compiled_grouping(chosen, experts + shared, **facts))


@pytest.mark.parametrize(FACTS, often_together(FEW_TOKENS, [FEW_TOKENS[number] for number in (0, 2, 3, 4)]))
def test_few_tokens_are_routed_and_grouped(tokens, experts, per_token, scoring, biased, rows_of_choices):
    with interpreted():
        assert_few_are_routed(tokens, experts, per_token, scoring, biased, rows_of_choices)


@pytest.mark.gpu
@pytest.mark.parametrize(FACTS, FEW_TOKENS)
def test_gpu_few_tokens_are_routed_and_grouped(tokens, experts, per_token, scoring, biased, rows_of_choices):
    if scoring in ("sigmoid", "softmax") and biased:
        pytest.skip("scores of approximate exponentials may choose another of nearly equal experts")
    assert_few_are_routed(tokens, experts, per_token, scoring, biased, rows_of_choices)


SHARED = [(8, 64, 6, "softmax", False, False, 2), (3, 32, 3, "sigmoid", True, True, 1)]


@pytest.mark.parametrize((*FACTS, "shared"), often_together(SHARED, SHARED[:1]))
def test_few_tokens_are_routed_beside_shared_experts(
    tokens, experts, per_token, scoring, biased, rows_of_choices, shared
):
    with interpreted():
        assert_few_are_routed(tokens, experts, per_token, scoring, biased, rows_of_choices, shared)


@pytest.mark.gpu
@pytest.mark.parametrize((*FACTS, "shared"), SHARED)
def test_gpu_few_tokens_are_routed_beside_shared_experts(
    tokens, experts, per_token, scoring, biased, rows_of_choices, shared
):
    if biased:
        pytest.skip("scores of approximate exponentials may choose another of nearly equal experts")
    assert_few_are_routed(tokens, experts, per_token, scoring, biased, rows_of_choices, shared)


def test_few_tokens_of_infinities_and_no_numbers_harm_no_other():
    """Each token has experts, no two the same; equal zeros of both signs choose the lower numbers."""
    routing, facts = Routing(num_experts=32, per_token=8), {"num_tokens": 8, "block_rows": BLOCK_ROWS}
    logits = random_logits(8, 32).at[1].set(jnp.nan).at[3].set(-jnp.inf).at[5, 4].set(jnp.inf)
    logits = logits.at[6].set(jnp.where(jnp.arange(32) % 2 == 0, -0.0, 0.0))
    with interpreted():
        weights, groups = jax.jit(functools.partial(route_few.route_and_group_few, routing, **facts))(
            logits[None], None
        )
    expected_weights, chosen = routed(logits, routing, None)
    others = np.array([0, 2, 4, 6, 7])
    np.testing.assert_allclose(weights.T[others], expected_weights[others], rtol=1e-5)
    assert len(np.unique(groups.slots)) == groups.slots.size
    expert_of = {}
    for expert, first, rows in groups.work[: int(groups.num_tiles[0])].tolist():
        expert_of |= dict.fromkeys(range(first, first + rows), expert)
    found = np.vectorize(expert_of.get)(groups.slots.T)
    np.testing.assert_array_equal(found[others], chosen[others])
    assert all(len(set(row)) == 8 for row in found.tolist())


CHOSEN = [(70, "softmax_normalised", False), (3, "sigmoid", True), (130, "softmax", True), (70, "softmax", False)]


@pytest.mark.parametrize(
    ("tokens", "scoring", "biased", "shared"),
    often_together(
        [(*case, shared) for case in CHOSEN for shared in (0, 1)],
        [(70, "softmax_normalised", False, 0), (3, "sigmoid", True, 1)],
    ),
)
def test_choose_experts_is_routing(tokens, scoring, biased, shared):
    routing = Routing(num_experts=EXPERTS, per_token=3, shared=shared, **SCORINGS[scoring])
    bias = jnp.asarray(np.tile([0.3, 0.3, -0.2, 0.1], EXPERTS // 4), jnp.float32) if biased else None
    logits = random_logits(tokens)
    with interpreted():
        weights, chosen = jax.jit(functools.partial(choice.choose_experts, routing))(logits, bias)
    expected_weights, expected = compiled_routed(logits, routing, bias)
    np.testing.assert_array_equal(np.asarray(chosen).T, expected)
    np.testing.assert_allclose(np.asarray(weights).T, expected_weights, rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "who", "rows_of_choices"),
    [
        slow(3, "any", True),
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
        groups = jax.jit(functools.partial(route.group_chosen, routing, **facts))(np.asarray(chosen).T)
    assert_groups(groups, compiled_grouping(chosen, EXPERTS, **facts))


def test_groups_have_a_slot_for_each_row_and_tiles_for_each_slot():
    """What both ways of grouping have to give, without either's arithmetic."""
    chosen = np.asarray(
        build(ExpertCase(name="g", tokens=300, per_token=3, choice="strays", hidden=8, units=8)).args[2]
    )
    groups = jax.tree.map(np.asarray, compiled_grouping(jnp.asarray(chosen), 8, BLOCK_ROWS))
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
