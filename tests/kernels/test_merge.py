"""Merging parts: against the oracle, and with parts that saw nothing."""

import inspect

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import (
    AttentionSpec,
    lse_from_base2,
    lse_to_base2,
    merge_state,
    merge_states,
    ragged_extend,
    reference,
)
from jattn_kernels.merge import sink_share

ROWS, HEADS, WIDTH = 5, 3, 4


def parts(count, dtype=jnp.float32):
    rng = np.random.default_rng(count)
    outs = jnp.asarray(rng.standard_normal((count, ROWS, HEADS, WIDTH)), dtype)
    lses = jnp.asarray(rng.standard_normal((count, ROWS, HEADS)) * 20, jnp.float32)
    return outs, lses


@pytest.mark.parametrize("count", [1, 2, 5])
def test_merge_states_agrees_with_the_oracle(count):
    outs, lses = parts(count)
    lses = lses.at[0, 1].set(-jnp.inf).at[:, 2].set(-jnp.inf)
    out, lse = merge_states(outs, lses)
    expected_out, expected_lse = reference.merge_states(outs, lses)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


def test_merge_state_equals_merge_states_of_two():
    outs, lses = parts(2)
    chex.assert_trees_all_equal(merge_state(outs[0], lses[0], outs[1], lses[1]), merge_states(outs, lses))


def test_merge_of_empty_parts_is_empty():
    outs, lses = parts(2)
    out, lse = merge_states(outs, jnp.full_like(lses, -jnp.inf))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_merge_with_an_empty_part_keeps_the_other_to_the_bit():
    outs, lses = parts(2)
    out, lse = merge_state(outs[0], lses[0], jnp.full_like(outs[1], jnp.nan), jnp.full_like(lses[1], -jnp.inf))
    chex.assert_trees_all_equal((out, lse), (outs[0], lses[0]))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_merge_of_low_precision_rounds_once(dtype):
    outs, lses = parts(4, dtype)
    out, lse = merge_states(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    exact, _ = merge_states(outs.astype(jnp.float32), lses)
    chex.assert_trees_all_equal(out, exact.astype(dtype))


def test_merge_of_distant_lses_does_not_overflow():
    outs, _ = parts(2)
    lses = jnp.stack([jnp.full((ROWS, HEADS), 3e38, jnp.float32), jnp.full((ROWS, HEADS), -3e38, jnp.float32)])
    out, lse = merge_states(outs, lses)
    chex.assert_trees_all_equal((out, lse), (outs[0], lses[0]))


def test_merge_of_base_2_parts_weighs_them_by_powers_of_two():
    outs, lses = parts(2)
    base2 = lses.at[:, 0].set(jnp.array([[3.0] * HEADS, [1.0] * HEADS]))
    out, lse = merge_states(outs, lse_from_base2(base2))
    np.testing.assert_allclose(out[0], (4 * outs[0, 0] + outs[1, 0]) / 5, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse_to_base2(lse)[0], np.log2(10), rtol=1e-6)


def test_sink_share_is_the_part_of_the_denominator_that_is_keys():
    lse = jnp.log(jnp.array([[3.0, 1.0], [0.0, 0.0]]))
    share = sink_share(lse, jnp.array([0.0, -jnp.inf]))
    np.testing.assert_allclose(share, [[3 / 4, 1], [0, 0]], rtol=1e-6)


def test_sinks_after_a_merge_equal_sinks_of_the_whole():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((ROWS, HEADS, WIDTH)), jnp.float32) for _ in range(3))
    spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=WIDTH, causal=False)
    sinks = jnp.array([-1.0, 0.0, 2.0])

    def part(first, last, **options):
        offsets = jnp.array([0, ROWS], jnp.int32), jnp.array([0, last - first], jnp.int32)
        return ragged_extend(q, k[first:last], v[first:last], *offsets, spec=spec, return_lse=True, **options)

    out, lse = merge_state(*part(0, 2), *part(2, ROWS))
    whole_out, whole_lse = part(0, ROWS, sinks=sinks)
    np.testing.assert_allclose(out * sink_share(lse, sinks)[..., None], whole_out, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=2e-6)


def test_lse_base_conversion_is_exact_at_powers_of_two():
    np.testing.assert_allclose(lse_to_base2(jnp.log(jnp.float32(8))), 3, rtol=1e-6)
    np.testing.assert_allclose(lse_from_base2(lse_to_base2(jnp.float32(5))), 5, rtol=1e-6)


def test_merge_of_what_does_not_belong_together_is_refused():
    merge, merge_all = inspect.unwrap(merge_state), inspect.unwrap(merge_states)  # as users have them
    outs, lses = parts(2)
    with pytest.raises(
        ValueError, match=r"`out_a` and `out_b` must be of one shape\. Got out_a.shape=\(5, 3, 4\), out_b"
    ):
        merge(outs[0], lses[0], outs[1, :1], lses[1, :1])
    with pytest.raises(ValueError, match="`lse_a` and `lse_b`"):
        merge(outs[0], lses[0], outs[1], lses[1, :1])
    with pytest.raises(ValueError, match="`out_a` and `out_b`"):
        merge(outs[0], lses[0], outs[1].astype(jnp.bfloat16), lses[1])
    with pytest.raises(ValueError, match="`lse_b`"):
        merge(outs[0], lses[0], outs[1], None)
    with pytest.raises(ValueError, match="`outs`"):
        merge_all(list(outs), lses)
