"""Kernel cases as calls of FlashInfer's wrappers: page tables become lists, rows without keys have no pages."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn_kernels.spec import AttentionSpec
from tests.kernels.harness.case import Case, Inputs, build
from tests.kernels.harness.tolerance import assert_close

SPEC = AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=16)


def page_lists(page_table: Any, seq_lens: Any, page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """indptr, indices and last_page_len; the last of a sequence without pages is nonsense that nobody may read."""
    lengths = np.asarray(seq_lens)
    held = -(-lengths // page_size)
    indices = [np.asarray(page_table)[row, :count] for row, count in enumerate(held)]
    last = np.where(held > 0, lengths - page_size * (held - 1), 99)
    return np.concatenate([[0], np.cumsum(held)]).astype(np.int32), np.concatenate(indices), last.astype(np.int32)


def numbers(case: Case, seed: int = 0) -> Inputs:
    """The case's numbers, with ALiBi's own slopes where it has any, and a mask without unused entries."""
    inputs = build(case, seed)
    if case.alibi:
        inputs.kwargs["alibi_slopes"] = jnp.asarray(slopes(case.spec.num_q_heads), jnp.float32)
    if case.custom_mask:
        entries = int(np.dot(case.q_lens, case.kv_lens))
        inputs.kwargs["custom_mask"] = inputs.kwargs["custom_mask"][:entries]
    return inputs


def slopes(num_heads: int) -> list[float]:
    """ALiBi's slopes as its paper has them: a geometric sequence for a power of two, else every second of the next."""
    closest = 2 ** math.floor(math.log2(num_heads))
    if closest == num_heads:
        return [2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)]
    return slopes(closest) + slopes(2 * closest)[::2][: num_heads - closest]


def facts(case: Case) -> dict[str, Any]:
    """The static facts of a case in FlashInfer's words."""
    spec = case.spec
    mode = "ALIBI" if case.alibi else "NONE" if spec.rope_theta is None else "ROPE_LLAMA"
    return {
        "num_kv_heads": spec.num_kv_heads,
        "pos_encoding_mode": mode,
        "window_left": -1 if spec.window_left is None else spec.window_left,
        "logits_soft_cap": spec.logits_soft_cap,
        "sm_scale": spec.sm_scale,
        "rope_scale": None if spec.rope_scale == 1.0 else spec.rope_scale,
        "rope_theta": spec.rope_theta,
        "q_data_type": case.dtype,
        "kv_data_type": case.kv_dtype,
    }


def scales(inputs: Inputs) -> dict[str, Any]:
    """The scales of a case, scalars as Python floats."""
    given = {name: inputs.kwargs[name] for name in ("q_scale", "k_scale", "v_scale") if name in inputs.kwargs}
    return {name: float(scale) if scale.ndim == 0 else scale for name, scale in given.items()}


def assert_base2_close(case: Case, inputs: Inputs, out: Any, lse: Any) -> None:
    """Asserts that an answer is the oracle's; decode's has an axis of one query less than the kernels'."""
    natural = np.asarray(lse, np.float32) * np.float32(math.log(2))
    if case.is_decode:
        out, natural = out[:, None], natural[:, None]
    assert_close(case, inputs, out, natural)
