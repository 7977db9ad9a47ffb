"""How far attention is from exact attention, over the numbers that it was given and over those before fp8."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.attention import Measured
from bench.workloads import Arrays, AttentionWorkload
from jattn_kernels import paged_decode, paged_extend, reference

SAMPLED_TOKENS = 16  # of a prompt: the exact results are float64, on the host


def measured(workload: AttentionWorkload, implementation: str) -> Measured:
    """Compares a workload's results with the reference's, on the default device.

    The row has, of the vectors that the query tokens' heads give, the error's length over the exact one's:

    - `error`, `worst_error`: root mean square and maximum, against exact attention over the same numbers;
    - `rounded_error`: the root mean square against exact attention over those numbers before they were rounded to fp8;
    - `lse_error`: the largest difference of a log-sum-exp, over the same numbers.

    Raises:
        NotImplementedError: The implementation refuses it.
    """
    arrays = _arrays(workload, implementation)
    attend, takes = (paged_decode, 5) if workload.q_tokens is None else (paged_extend, 6)
    arguments: tuple[Any, ...] = arrays[:takes]
    out, lse = attend(
        *arguments,
        spec=workload.spec,
        schedule=arrays.schedule,
        layer_index=0,
        return_lse=True,
        implementation=implementation,
    )
    tokens = _sampled(workload)
    out, lse = (np.asarray(x.astype(jnp.float32)[tokens], np.float64) for x in (out, lse))
    exact_out, exact_lse = _exact(workload, arrays, tokens)
    errors = _relative(out, exact_out)
    found = {"error": _rms(errors), "worst_error": errors.max(), "lse_error": np.abs(lse - exact_lse).max()}
    if workload.kv.startswith("fp8"):
        del arrays
        wide = dataclasses.replace(workload, kv="bf16", q=None)
        unrounded, _ = _exact(wide, _arrays(wide, implementation), tokens)
        found["rounded_error"] = _rms(_relative(out, unrounded))
    figures = {name: float(f"{value:.3g}") for name, value in found.items()}
    return Measured({**workload.fields(), "impl": f"jattn-{implementation}", **figures}, [])


def _arrays(workload: AttentionWorkload, implementation: str) -> Arrays:
    return jax.jit(functools.partial(workload.arrays, 1, implementation))()


def _sampled(workload: AttentionWorkload) -> Any:
    """All sequences of a decode, or some tokens of one prompt."""
    if workload.q_tokens is None:
        return slice(None)
    assert workload.q_lens == workload.kv_lens
    assert len(workload.q_lens) == 1
    return np.unique(np.linspace(0, workload.ctx - 1, SAMPLED_TOKENS).astype(np.int32))


def _exact(workload: AttentionWorkload, arrays: Arrays, tokens: Any) -> Any:
    """The reference's output and lse of the sampled tokens."""
    q, k_pages, v_pages, page_table, seq_lens = jax.device_get(arrays[:5])
    options: dict[str, Any] = {"spec": workload.spec, "layer_index": 0, "return_lse": True}
    if workload.q_tokens is None:
        return reference.paged_decode(q, k_pages, v_pages, page_table, seq_lens, **options)
    ends = np.array([0, len(tokens)])
    return reference.paged_extend(
        q[tokens], k_pages, v_pages, page_table, seq_lens, ends, q_positions=tokens, **options
    )


def _relative(out: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Of each vector, the error's length over the exact one's."""
    return np.linalg.norm(out - exact, axis=-1) / np.linalg.norm(exact, axis=-1)


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))
