"""Errors are of the sampled vectors, and those of fp8 are told apart from what rounding did."""

import dataclasses

import jax.numpy as jnp
import pytest

from bench import accuracy
from bench.accuracy import measured
from bench.workloads import AttentionWorkload
from jattn_kernels import paged_extend
from tests.often import slow

PROMPT = AttentionWorkload(batch=1, ctx=200, q_tokens=200, hq=4, hkv=2, d=16, page=8)
DECODE = dataclasses.replace(PROMPT, batch=3, ctx=70, q_tokens=None)


@pytest.mark.parametrize("workload", [slow(PROMPT), DECODE], ids=lambda workload: workload.name)
def test_rounding_to_fp8_is_told_apart(workload):
    rounded = []
    for q in (None, "fp8_e4m3"):
        row, kernels = measured(dataclasses.replace(workload, kv="fp8_e4m3", q=q), "xla")
        assert kernels == []
        assert row["impl"] == "jattn-xla"
        assert 0.0005 < row["error"] < row["worst_error"] < 0.01  # bf16's outputs
        assert 0 < row["lse_error"] < 1e-4
        rounded.append(row["rounded_error"])
    # Of queries, keys and values each, rounded, moves an output by some 40th of its size.
    assert 0.035 < rounded[0] < rounded[1] < 0.07


@pytest.mark.parametrize("workload", [PROMPT, slow(DECODE)], ids=lambda workload: workload.name)
def test_nothing_was_rounded_in_bf16(workload):
    row, _ = measured(workload, "xla")
    assert 0.0005 < row["error"] < 0.01
    assert "rounded_error" not in row


def test_one_wrong_head_of_one_sampled_token_shows(monkeypatch):
    def wrong(*args, **kwargs):
        out, lse = paged_extend(*args, **kwargs)
        return out.at[199, 2].multiply(jnp.bfloat16(1.5)), lse.at[0, 0].add(-0.25)

    monkeypatch.setattr(accuracy, "paged_extend", wrong)
    row, _ = measured(PROMPT, "xla")
    assert row["worst_error"] == pytest.approx(0.5, abs=0.02)
    assert row["error"] == pytest.approx((0.5**2 / (accuracy.SAMPLED_TOKENS * 4)) ** 0.5, rel=0.05)
    assert row["lse_error"] == pytest.approx(0.25, abs=0.001)
