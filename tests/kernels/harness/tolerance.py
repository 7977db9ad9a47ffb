"""How close to the oracle an implementation must come."""

import math
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np

from jattn_kernels import reference
from jattn_kernels.reference.scores import alibi, rotate
from tests.kernels.harness.case import Case, Inputs

# A sum of fp8 products is cut off after every 32 of them, each time by up to so much of the sizes of the two rows; four
# times at least, since queries come in parts, which are added up.
_CUT, _NUMBERS_A_CUT, _LEAST_CUTS = 2.0**-14, 32, 4


def oracle(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse in float64."""
    return getattr(reference, case.operation)(*inputs.args, **inputs.kwargs, return_lse=True)


def tolerances(case: Case, inputs: Inputs, *, narrow_products: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Absolute errors allowed in the output and the lse: [..., 1, 1] and [..., 1], one of each a query row.

    Args:
        narrow_products: Whether tensor cores multiply fp8 keys as they are: Hopper's keep some 13 bits of such sums.

    Twice the largest error, relative to a row's size, of dense float32 maths that rounds P and the output to the input
    dtype, plus a floor for sums in another order: sqrt(terms) float32 epsilons, and one rounding of the output. Where
    rows are rotated the floor has what rounding them does to a logit.
    """
    exact_out, exact_lse = oracle(case, inputs)
    out, lse = _in_input_dtype(case, inputs)
    exact_lse, lse = (np.where(np.isneginf(exact_lse), 0.0, x) for x in (exact_lse, lse))
    out_size = np.abs(exact_out).max(axis=(-2, -1), keepdims=True)
    lse_size = np.maximum(1.0, np.abs(exact_lse).max(axis=-1, keepdims=True))
    float32_floor = math.sqrt(case.spec.head_dim + max(case.kv_lens)) * float(np.finfo(np.float32).eps)
    of_logits = _rounding_of_rotated_rows(case, inputs)
    narrow_products &= case.spec.rope_theta is None and not case.is_packed
    if narrow_products and jnp.dtype(case.kv_dtype or case.dtype).itemsize == 1:
        cuts = max(_LEAST_CUTS, case.spec.head_dim // _NUMBERS_A_CUT)
        of_logits += cuts * _CUT * math.prod(_sizes_of_rows(case, inputs)) * abs(case.spec.scale)
    # A logit's rounding moves the output by that much relative to it, so the output's floor has the logits' size too.
    out_floor = float32_floor * lse_size[..., None] + of_logits + float(jnp.finfo(case.out_dtype).eps) / 2
    out_error = (np.abs(out - exact_out) / np.where(out_size == 0, 1.0, out_size)).max()
    lse_error = (np.abs(lse - exact_lse) / lse_size).max()
    return (2 * out_error + out_floor) * out_size, (2 * lse_error + float32_floor) * lse_size + of_logits


def _rounding_of_rotated_rows(case: Case, inputs: Inputs) -> float:
    """Three standard deviations of a logit's error when the 2 H numbers that it comes from are rounded."""
    spec = case.spec
    if spec.rope_theta is None:
        return 0.0
    q, k = _sizes_of_rows(case, inputs)
    # The angle, its sine and cosine, two products and their sum are float32 roundings of the same rows.
    eps = math.hypot(float(jnp.finfo(case.out_dtype).eps), 5**0.5 * float(np.finfo(np.float32).eps))
    return 3 * eps / math.sqrt(12) * abs(spec.scale) * q * k * math.sqrt(2 / spec.head_dim)


def _sizes_of_rows(case: Case, inputs: Inputs) -> tuple[float, float]:
    """The largest norms of a row of q and of k."""
    requests = [r for r in reference.REQUESTS[case.operation](*inputs.args, **inputs.kwargs) if r.visible.any()]
    q, k = (
        max((float(np.linalg.norm(rows, axis=-1).max()) for rows in parts), default=0.0)
        for parts in ([r.q for r in requests], [r.k for r in requests])
    )
    return q, k


def assert_close(case: Case, inputs: Inputs, out: Any, lse: Any, *, narrow_products: bool = False) -> None:
    """Asserts dtypes, shapes and values of an implementation's answer; -inf must be -inf, and nothing may be NaN."""
    exact_out, exact_lse = oracle(case, inputs)
    chex.assert_shape([out, lse], [exact_out.shape, exact_lse.shape])
    chex.assert_type([out, lse], [case.out_dtype, jnp.float32])
    out, lse = (np.asarray(x).astype(np.float64) for x in (out, lse))
    chex.assert_tree_all_finite(out)
    empty = np.isneginf(exact_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty, f"{case.name}: rows that see nothing")
    np.testing.assert_array_equal(out[empty], 0.0, f"{case.name}: output of rows that see nothing")
    out_atol, lse_atol = tolerances(case, inputs, narrow_products=narrow_products)
    lse, exact_lse = np.where(empty, 0.0, lse), np.where(empty, 0.0, exact_lse)
    for name, actual, exact, atol in (("out", out, exact_out, out_atol), ("lse", lse, exact_lse, lse_atol)):
        # Scaled so that 1 is the tolerance: the message then shows by how much it was missed.
        safe = np.maximum(atol, np.finfo(np.float64).tiny)
        np.testing.assert_allclose(
            actual / safe, exact / safe, rtol=0, atol=1, err_msg=f"{case.name}: {name} in units of its tolerance"
        )


def _in_input_dtype(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    lse = np.full((*inputs.args[0].shape[:-2], case.spec.num_q_heads), -np.inf)
    flat_lse = lse.reshape(-1, case.spec.num_q_heads)
    flat_out = np.zeros((*flat_lse.shape, case.spec.value_dim))
    for request in reference.REQUESTS[case.operation](*inputs.args, **inputs.kwargs):
        flat_out[request.rows], flat_lse[request.rows] = _attend_rounded(request, case)
    return flat_out.reshape(*lse.shape, -1), lse


def _attend_rounded(request: reference.Request, case: Case) -> tuple[np.ndarray, np.ndarray]:
    spec, dtype = case.spec, case.out_dtype
    q, k, v = (x.astype(np.float32) for x in (request.q, request.k, request.v))
    if case.is_packed:  # numbers times scales are none of the input dtype's yet
        k, v = (x.astype(dtype).astype(np.float32) for x in (k, v))
    if spec.rope_theta is not None:
        q, k = (
            rotate(x, position, spec.rope_theta, spec.rope_scale).astype(dtype).astype(np.float32)
            for x, position in ((q, request.p), (k, request.j))
        )
    k, v = (np.repeat(x, spec.group_size, axis=1) for x in (k, v))
    logits = np.float32(spec.scale) * np.einsum("qnh,snh->qns", q, k)
    if spec.logits_soft_cap is not None:
        logits = np.float32(spec.logits_soft_cap) * np.tanh(logits / np.float32(spec.logits_soft_cap))
    if request.alibi_slopes is not None:
        logits += alibi(request.alibi_slopes, request.p, request.j, causal=spec.causal).astype(np.float32)
    logits = np.where(request.visible[:, None, :], logits, np.float32(-np.inf))
    top = logits.max(axis=-1, initial=-np.inf)
    top = np.where(np.isneginf(top), np.float32(0), top)
    weights = np.exp(logits - top[..., None])
    total = weights.sum(axis=-1)
    safe_total = np.where(total == 0, np.float32(1), total)
    weights = weights.astype(dtype).astype(np.float32)
    out = np.einsum("qns,snh->qnh", weights, v) / safe_total[..., None]
    if request.sinks is not None:
        out *= (safe_total / (safe_total + np.exp(request.sinks.astype(np.float32) - top)))[..., None]
    return out.astype(dtype).astype(np.float64), np.where(total == 0, -np.inf, top + np.log(safe_total))
