"""The mixture against a loop over tokens and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.parallel import ONE_DEVICE, Parallel
from jattn.routing import Routing
from jattn_models.experts import ClampedSwiGLU, Experts, MixtureOfExperts
from tests.models.harness.plain_mixture import plain_mixture, sigmoid
from tests.often import slow

WIDTH, UNITS, COUNT = 8, 6, 5


def routing_to(per_token, **facts):
    return Routing(num_experts=COUNT, per_token=per_token, **facts)


def mixture(routing, *, dtype=jnp.float32, parallel=ONE_DEVICE, **facts):
    experts = Experts(routing=routing, intermediate_size=UNITS, **facts)
    made = MixtureOfExperts(WIDTH, experts, dtype=dtype, rngs=nnx.Rngs(0), parallel=parallel)
    for leaf in jax.tree.leaves(made, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)):
        leaf[...] = 20 * np.asarray(leaf[...])  # so that tokens prefer different experts
    return made


def tokens(count, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, WIDTH)), jnp.float32)


def applied(made, x):
    """Compiled as a whole, which takes a fraction of compiling its operations one by one."""
    graph, state = nnx.split(made)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)


def filled(made):
    """The mixture with biases that are not 0."""
    for number, leaf in enumerate(jax.tree.leaves(made, is_leaf=lambda leaf: isinstance(leaf, nnx.Param))):
        if not np.asarray(leaf[...]).any():
            values = np.random.default_rng(number).standard_normal(leaf[...].shape)
            leaf[...] = jnp.asarray(values, leaf[...].dtype)
    return made


def softmax_of(count, *, normalised):
    """The weights of the `count` best of a token's experts."""

    def weights_of(logits):
        powers = np.exp(logits - logits.max())
        best = np.argsort(-logits)[:count]
        return dict(zip(best.tolist(), powers[best] / (powers[best] if normalised else powers).sum(), strict=True))

    return weights_of


def assert_is_plain(made, x, weights_of, out=None):
    expected, sizes = plain_mixture(made, x, weights_of)
    # Sums of 8 (router, gate, up), 6 and at most 6 terms, one after another.
    tolerance = (3 * WIDTH + UNITS + COUNT + 1) * np.finfo(np.float32).eps * sizes.max()
    np.testing.assert_allclose(applied(made, x) if out is None else out, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("per_token", "normalised"),
    [slow(1, True), (1, False), (2, True), slow(2, False), slow(COUNT, True), (COUNT, False)],
)
def test_mixture_is_the_weighted_sum_of_chosen_experts(per_token, normalised):
    made = mixture(routing_to(per_token, normalised=normalised))
    assert_is_plain(made, tokens(13), softmax_of(per_token, normalised=normalised))


@pytest.mark.parametrize("per_token", [slow(1), 2])
def test_inputs_weighed_by_sigmoids_beside_a_shared_expert(per_token):
    made = mixture(routing_to(per_token, scoring="sigmoid"), weighs_inputs=True, shared_size=UNITS)
    assert_is_plain(
        made, tokens(13), lambda logits: {best: sigmoid(logits[best]) for best in np.argsort(-logits)[:per_token]}
    )


def test_large_scores_still_choose_the_largest():
    made = mixture(routing_to(1, scoring="sigmoid"))
    scores = jnp.array([30.0, 40.0, 20.0, 60.0, 50.0])  # whose sigmoids are all 1 in float32
    made.router.kernel[...] = jnp.zeros((WIDTH, COUNT)).at[0].set(scores)
    assert made.router.route(jnp.ones((1, WIDTH)))[1].tolist() == [[3]]


def test_mixture_compiles_once_whatever_the_router_chooses():
    made = mixture(routing_to(2, normalised=True))
    traced = []

    @jax.jit
    def apply(x):
        traced.append(x)
        return made(x), made.router.route(x)[1]

    one = jnp.broadcast_to(tokens(1), (6, WIDTH))
    crowded, many = apply(one)[1], apply(tokens(6))[1]
    assert len(np.unique(crowded)) == 2 < len(np.unique(many))
    assert len(traced) == 1


def test_token_that_is_not_finite_harms_no_other():
    made, x = mixture(routing_to(2, normalised=True)), tokens(6)
    others = np.arange(6) != 2
    poisoned = np.asarray(applied(made, np.where(others[:, None], x, np.nan).astype(np.float32)))
    assert np.isnan(poisoned[2]).all()
    np.testing.assert_array_equal(poisoned[others], np.asarray(applied(made, x))[others])


def test_bfloat16_mixture_rounds_no_worse_than_its_inputs():
    made, x = mixture(routing_to(2, normalised=True)), tokens(13)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(made))
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    graph = nnx.graphdef(made)
    x = x.astype(jnp.bfloat16)
    out = applied(nnx.merge(graph, narrow), x)
    assert out.dtype == jnp.bfloat16
    weights_of = softmax_of(2, normalised=True)
    expected, sizes = plain_mixture(nnx.merge(graph, exact), x.astype(jnp.float32), weights_of)
    # Router, gate and up, silu, product, down and the result are rounded, each by at most half an epsilon.
    tolerance = 6 * float(jnp.finfo(jnp.bfloat16).eps) * sizes.max()
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=0, atol=tolerance)


def gpt_oss(**facts):
    return mixture(
        routing_to(2, scoring="softmax_of_chosen"),
        activation=ClampedSwiGLU(limit=7.0, alpha=1.702),
        biased=True,
        router_biased=True,
        **facts,
    )


def test_softmax_of_chosen_with_biases_and_clamped_swiglu():
    made, x = filled(gpt_oss()), 3 * tokens(40)
    assert_is_plain(made, x, softmax_of(2, normalised=True))
    limit = made.experts.activation.limit
    gate, up = np.split(np.einsum("td,edf->tef", x, made.gate_up_proj.kernel[...]), 2, axis=-1)
    assert (gate > limit).any() and (up > limit).any() and (up < -limit).any() and (gate < -limit).any()  # noqa: PT018


def test_choice_bias_and_groups_reach_the_router():
    routing = Routing(
        num_experts=6,
        per_token=2,
        scoring="sigmoid",
        normalised=True,
        scaling_factor=2.5,
        num_groups=3,
        groups_per_token=2,
        group_score="two_best",
    )
    made = filled(mixture(routing, choice_biased=True, shared_size=UNITS, shared_gated=True))
    bias = np.asarray(made.router.choice_bias[...], np.float64)

    def weights_of(logits):
        scores = sigmoid(logits)
        groups = np.argsort(-(scores + bias).reshape(3, 2).sum(axis=1))[:2]
        allowed = [expert for expert in range(6) if expert // 2 in groups]
        chosen = sorted(allowed, key=lambda expert: -(scores + bias)[expert])[:2]
        return {expert: 2.5 * scores[expert] / scores[chosen].sum() for expert in chosen}

    assert_is_plain(made, tokens(40), weights_of)
    made.router.choice_bias[...] = jnp.zeros(6)
    assert np.abs(np.asarray(applied(made, tokens(40))) - plain_mixture(made, tokens(40), weights_of)[0]).max() > 0.1


def test_router_of_bfloat16_rounds_no_logit():
    made = mixture(routing_to(2), dtype=jnp.bfloat16)
    kernel = made.router.kernel[...]
    made.router.kernel[...] = kernel.at[:, 1].set(kernel[:, 0]).at[0, 1].add(jnp.asarray(2**-9, jnp.bfloat16))
    x = jnp.ones((1, WIDTH), jnp.bfloat16)
    weights, chosen = made.router.route(x)
    logits = np.asarray(x, np.float64) @ np.asarray(made.router.kernel[...], np.float64)
    assert weights.dtype == jnp.float32
    expected = np.exp(logits[0]) / np.exp(logits).sum()
    np.testing.assert_allclose(weights[0], expected[chosen[0]], rtol=40 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("shared_size", [slow(None), UNITS])
def test_two_devices_count_each_bias_once(shared_size):
    whole, x, parallel = filled(gpt_oss(shared_size=shared_size)), tokens(13), Parallel("tensor", 2)
    graph = nnx.graphdef(gpt_oss(shared_size=shared_size, parallel=parallel))
    parts = [jax.tree.map(np.array, nnx.state(whole)) for _ in range(2)]  # the state itself is the mixture's
    for rank, part in enumerate(parts):
        for path, variable in nnx.to_flat_state(part):
            leaf, half = variable.get_value(), UNITS // 2
            if "gate_up_proj" in path:
                leaf = np.concatenate(
                    [block[..., rank * half :][..., :half] for block in np.split(leaf, 2, axis=-1)], axis=-1
                )
            elif "down_proj" in path and "kernel" in path:
                leaf = leaf[..., rank * half :, :][..., :half, :]
            variable.set_value(leaf)
    both = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    summed = jax.vmap(lambda state: parallel.all_reduce(nnx.merge(graph, state)(x)), axis_name="tensor")
    out = jax.jit(summed)(both)
    for device in out:
        assert_is_plain(whole, x, softmax_of(2, normalised=True), device)


def test_gate_of_no_shared_expert_is_refused():
    with pytest.raises(ValueError, match=r"`shared_gated` needs a shared expert\. Got shared_size=None"):
        mixture(routing_to(2), shared_gated=True)
