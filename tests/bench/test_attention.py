"""A row of the record is timed over calls that each depend on the last, on tiny sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention
from bench.attention import measured, num_calls, num_pools, unrolled
from bench.latent_workload import ExpandedWorkload, LatentWorkload
from bench.named_workloads import DECODE, EXTEND
from bench.workloads import AttentionWorkload
from tests.often import often

DECODE_TINY = AttentionWorkload(batch=3, ctx=21, hq=4, hkv=2, d=16, page=8)
EXTEND_TINY = dataclasses.replace(DECODE_TINY, q_tokens=5)
TWO_PASSES_TINY = dataclasses.replace(EXTEND_TINY, two_passes=True)
LATENT_TINY = LatentWorkload(batch=2, ctx=21, hq=2, page=8)
LATENTS_TINY = (LATENT_TINY, dataclasses.replace(LATENT_TINY, q_tokens=5), ExpandedWorkload(tokens=9, hq=2))
L2_BYTES = 60 * 2**20


@pytest.mark.parametrize("workload", [*DECODE, *EXTEND], ids=lambda workload: workload.name)
def test_pools_fit_in_memory_and_defeat_the_cache(workload):
    calls = num_calls(workload)
    pools = num_pools(workload, calls)
    assert 2 <= pools <= calls <= 128
    assert 2 * L2_BYTES < pools * workload.kv_bytes < 10e9


@pytest.mark.parametrize("pools", [1, 3])
def test_unrolled_decode_feeds_outputs_back(pools):
    arrays = DECODE_TINY.arrays(pools, "xla")
    out = unrolled(DECODE_TINY, "xla", calls=4, pools=pools)(arrays)[-1]
    for i in range(4):
        arrays = arrays._replace(q=DECODE_TINY.call(arrays, jnp.int32(i % pools), "xla"))
    np.testing.assert_allclose(out.astype(jnp.float32), arrays.q.astype(jnp.float32), atol=0.05)


def test_unrolled_two_passes_give_every_output():
    arrays = jax.eval_shape(lambda: TWO_PASSES_TINY.arrays(1, "xla"))
    run = unrolled(TWO_PASSES_TINY, "xla", calls=3, pools=1)
    assert [out.shape for out in jax.eval_shape(run, arrays)] == [arrays.q.shape] * 3


def test_unrolled_extend_gives_the_last_pools_answer():
    arrays = EXTEND_TINY.arrays(3, "xla")
    out = unrolled(EXTEND_TINY, "xla", calls=3, pools=3)(arrays)[-1]
    expected = EXTEND_TINY.call(arrays, jnp.int32(2), "xla")
    np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=0.02)


@pytest.mark.slow  # XLA compiles a hundred calls in a row
@pytest.mark.parametrize("workload", LATENTS_TINY, ids=lambda workload: workload.name)
def test_latent_calls_are_timed(workload):
    row, _ = measured(workload, "xla", repeats=1, seconds=0.01)
    assert workload.fields().items() <= row.items()
    assert row["time_us"] > 0


@pytest.mark.parametrize(
    "workload",
    often([DECODE_TINY, EXTEND_TINY, TWO_PASSES_TINY, *LATENTS_TINY], [DECODE_TINY, EXTEND_TINY, *LATENTS_TINY[:2]]),
    ids=lambda workload: workload.name,
)
def test_unrolled_calls_all_remain(workload):
    """None is merged with another, nor left out: the work grows with their number."""
    arrays = jax.eval_shape(lambda: workload.arrays(1, "xla"))

    def flops(calls):
        return unrolled(workload, "xla", calls=calls, pools=1).lower(arrays).compile().cost_analysis()["flops"]

    assert flops(8) > 3.9 * flops(2)


@pytest.mark.parametrize("workload", [DECODE_TINY, dataclasses.replace(EXTEND_TINY, layout="HND")])
def test_measured_row_has_the_peers_names(workload, monkeypatch):
    monkeypatch.setattr(attention, "num_calls", lambda workload: 2)
    row = measured(workload, "xla", repeats=1, seconds=0.001).row
    assert row.items() >= workload.fields().items()
    assert row["impl"] == "jattn-xla"
    assert 0 < row["min_us"] <= row["time_us"]
    assert ("GBps" in row, "TFLOPs" in row) == ((True, False) if workload.q_tokens is None else (False, True))
    assert ("layout" in row) == (workload.layout == "HND")


def test_measured_refuses_what_the_implementation_refuses():
    with pytest.raises(NotImplementedError, match="`mosaic` has kernels for compute capability"):
        measured(DECODE_TINY, "mosaic")


def test_measured_row_of_fp8_pages_says_so(monkeypatch):
    monkeypatch.setattr(attention, "num_calls", lambda workload: 2)
    row = measured(dataclasses.replace(DECODE_TINY, kv="fp8_e4m3"), "xla", repeats=1, seconds=0.001).row
    assert row["kv"] == "fp8_e4m3"


def test_measured_rejects_numbers_that_are_not_finite(monkeypatch):
    arrays = DECODE_TINY.arrays(2, "xla")
    arrays = arrays._replace(v_pages=jnp.full_like(arrays.v_pages, jnp.nan))
    monkeypatch.setattr(AttentionWorkload, "arrays", lambda self, pools, implementation: arrays)
    monkeypatch.setattr(attention, "num_calls", lambda workload: 2)
    with pytest.raises(FloatingPointError, match="`xla` gives numbers that are not finite"):
        measured(DECODE_TINY, "xla", repeats=1)
