"""The mixture against a loop over tokens and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.parallel import ONE_DEVICE
from jattn_models.experts import Experts, MixtureOfExperts

WIDTH, UNITS, COUNT = 8, 6, 5


def mixture(per_token, *, dtype=jnp.float32, **facts):
    experts = Experts(count=COUNT, per_token=per_token, intermediate_size=UNITS, **facts)
    made = MixtureOfExperts(WIDTH, experts, dtype=dtype, rngs=nnx.Rngs(0), parallel=ONE_DEVICE)
    for leaf in jax.tree.leaves(made, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)):
        leaf[...] = 20 * leaf[...]  # so that tokens prefer different experts
    return made


def tokens(count, seed=0):
    return jax.random.normal(jax.random.key(seed), (count, WIDTH), jnp.float32)


def by_loops(made, x):
    """The mixture in float64, and what it may round to: all terms' sizes."""
    router, gate_up, down = (
        np.asarray(part.kernel[...], np.float64) for part in (made.router, made.gate_up_proj, made.down_proj)
    )
    out, sizes = np.zeros_like(x, np.float64), np.zeros_like(x, np.float64)
    for row, token in enumerate(np.asarray(x, np.float64)):
        scores = np.exp(token @ router)
        chosen = np.argsort(-scores)[: made.experts.per_token]
        total = scores[chosen].sum() if made.experts.normalised else scores.sum()
        for expert in chosen:
            gate, up = np.split(token @ gate_up[expert], 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            out[row] += scores[expert] / total * (hidden @ down[expert])
            sizes[row] += scores[expert] / total * (np.abs(hidden) @ np.abs(down[expert]))
    return out, sizes


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("per_token", [1, 2, COUNT])
def test_mixture_is_the_weighted_sum_of_chosen_experts(per_token, normalised):
    made, x = mixture(per_token, normalised=normalised), tokens(13)
    expected, sizes = by_loops(made, x)
    # Sums of 8 (router, gate, up), 6 and at most 5 terms, one after another.
    tolerance = (3 * WIDTH + UNITS + COUNT) * np.finfo(np.float32).eps * sizes.max()
    np.testing.assert_allclose(made(x), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("per_token", [1, 2])
def test_inputs_weighed_by_sigmoids_beside_a_shared_expert(per_token):
    made = mixture(per_token, normalised=False, sigmoid=True, weighs_inputs=True, shared_size=UNITS)
    x = tokens(13)
    wide = np.asarray(x, np.float64)
    router, gate_up, down, shared_gate_up, shared_down = (
        np.asarray(part.kernel[...], np.float64)
        for part in (made.router, made.gate_up_proj, made.down_proj, made.shared.gate_up_proj, made.shared.down_proj)
    )
    expected, sizes = (np.zeros_like(wide) for _ in range(2))
    for row, token in enumerate(wide):
        scores = token @ router
        parts = [(token, shared_gate_up, shared_down)]
        for expert in np.argsort(-scores)[:per_token]:
            parts.append((token / (1 + np.exp(-scores[expert])), gate_up[expert], down[expert]))
        for given, in_proj, out_proj in parts:
            gate, up = np.split(given @ in_proj, 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            expected[row] += hidden @ out_proj
            sizes[row] += np.abs(hidden) @ np.abs(out_proj)
    # Sums of 8 (router, gate, up), 6 and at most 3 terms, one after another.
    tolerance = (3 * WIDTH + UNITS + per_token + 1) * np.finfo(np.float32).eps * sizes.max()
    np.testing.assert_allclose(made(x), expected, rtol=0, atol=tolerance)


def test_large_scores_still_choose_the_largest():
    made = mixture(1, normalised=False, sigmoid=True)
    scores = jnp.array([30.0, 40.0, 20.0, 60.0, 50.0])  # whose sigmoids are all 1 in float32
    made.router.kernel[...] = jnp.zeros((WIDTH, COUNT)).at[0].set(scores)
    assert made.route(jnp.ones((1, WIDTH)))[1].tolist() == [[3]]


def test_mixture_compiles_once_whatever_the_router_chooses():
    made = mixture(2, normalised=True)
    traced = []

    @jax.jit
    def apply(x):
        traced.append(x)
        return made(x), made.route(x)[1]

    one = jnp.broadcast_to(tokens(1), (6, WIDTH))
    crowded, many = apply(one)[1], apply(tokens(6))[1]
    assert len(np.unique(crowded)) == 2 < len(np.unique(many))
    assert len(traced) == 1


def test_token_that_is_not_finite_harms_no_other():
    made, x = mixture(2, normalised=True), tokens(6)
    poisoned = np.asarray(made(x.at[2].set(jnp.nan)))
    others = np.arange(6) != 2
    assert np.isnan(poisoned[2]).all()
    np.testing.assert_array_equal(poisoned[others], np.asarray(made(x))[others])


def test_bfloat16_mixture_rounds_no_worse_than_its_inputs():
    made, x = mixture(2, normalised=True), tokens(13)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(made))
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    graph = nnx.graphdef(made)
    x = x.astype(jnp.bfloat16)
    out = nnx.merge(graph, narrow)(x)
    assert out.dtype == jnp.bfloat16
    expected, sizes = by_loops(nnx.merge(graph, exact), x.astype(jnp.float32))
    # Router, gate and up, silu, product, down and the result are rounded, each by at most half an epsilon.
    tolerance = 6 * float(jnp.finfo(jnp.bfloat16).eps) * sizes.max()
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=0, atol=tolerance)


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"`num_experts_per_tok` must be at most .* Got 6 of 5"):
        mixture(6, normalised=True)
