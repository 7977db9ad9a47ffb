"""Dense rows are of the same work as ours, and the fastest arrangement counts."""

import jax
import numpy as np
import pytest

from bench import dense
from bench.comparison import has_dense_equivalent
from bench.named_workloads import EXTEND, EXTEND_FEATURES
from bench.timing import Timing
from bench.workloads import AttentionWorkload

TINY = AttentionWorkload(batch=2, ctx=16, q_tokens=16, hq=4, hkv=2, d=16)


@jax.numpy_dtype_promotion("standard")
def attend_in_xla(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def measured(name, *arrangements):
    peer = dense.Peer(arrangements, "float32")
    return dense.measured(TINY, name, peer, executables=dense.compiled(TINY, peer))


def refuse(q, k, v):
    raise NotImplementedError("not this size")


def test_only_whole_prompts_without_features_are_dense():
    names = {w.name for w in (*EXTEND, *EXTEND_FEATURES) if has_dense_equivalent(w.fields())}
    assert "prefill_bf16_b16_ctx512_q512_h32-8x128_p16" in names
    others = ("window", "chunk", "mixed", "ctx8192_q1024", "decode", "fp8", "rope", "invariant")
    assert not any(part in name for name in names for part in others)


def test_a_row_is_of_the_workload_and_of_the_fastest(monkeypatch):
    times = iter((Timing(30.0, 29.0), Timing(20.0, 19.0)))
    monkeypatch.setattr(dense, "measure", lambda run, calls: (run(), next(times))[1])
    row, _ = measured("jax-xla", attend_in_xla, refuse, attend_in_xla)
    assert row["case"] == "prefill_dense"
    assert row["impl"] == "jax-xla"
    assert (row["batch"], row["q"], row["kv"], row["time_us"], row["min_us"]) == (2, 16, 16, 20.0, 19.0)
    assert row["TFLOPs"] == TINY.rate(20.0)["TFLOPs"]


def test_the_reason_is_told_where_none_takes_the_workload():
    with pytest.raises(NotImplementedError, match=r"`jax-none` does not take .*: not this size"):
        measured("jax-none", refuse, refuse)


def test_an_arrangement_that_fails_when_it_runs_is_passed_over(monkeypatch):
    found = iter((jax.errors.JaxRuntimeError("no memory"), Timing(20.0, 19.0), jax.errors.JaxRuntimeError("no memory")))

    def fake(run, calls):
        timing = next(found)
        if isinstance(timing, Exception):
            raise timing
        return timing

    monkeypatch.setattr(dense, "measure", fake)
    row, _ = measured("jax-xla", attend_in_xla, attend_in_xla)
    assert row["time_us"] == 20.0
    with pytest.raises(NotImplementedError, match=r"(?s)`jax-none` does not take .*: .*no memory"):
        measured("jax-none", refuse, attend_in_xla)


def random_operands(calls):
    shapes = [(2, 16, heads, 16) for heads in (4, 2, 2)]
    return [
        [jax.random.normal(jax.random.key(3 * call + i), shape) for i, shape in enumerate(shapes)]
        for call in range(calls)
    ]


def test_calls_in_a_row_give_what_each_gives():
    operands = random_operands(3)
    for out, each in zip(dense._in_a_row(attend_in_xla)(operands), operands, strict=True):
        np.testing.assert_allclose(out, attend_in_xla(*each), atol=1e-6)


def test_calls_in_a_row_all_remain():
    def flops(calls):
        return dense._in_a_row(attend_in_xla).lower(random_operands(calls)).compile().cost_analysis()["flops"]

    assert flops(4) > 3.9 * flops(1)
