"""Spans are divided by what ran in them, and profiles are summed by kernel."""

import time
import weakref

import jax
import jax.numpy as jnp
import pytest

from bench.timing import measure, profiled, read_profile, span_us

GPU_SPACE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "attend" } }
  event_metadata { key: 2 value { id: 2 name: "combine" } }
  lines {
    name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 }
    events { metadata_id: 2 offset_ps: 5000000 duration_ps: 1000000 }
    events { metadata_id: 1 offset_ps: 6000000 duration_ps: 2000000 }
  }
  lines { name: "Stream #14(MemcpyD2H)" events { metadata_id: 2 offset_ps: 7000000 duration_ps: 3000000 } }
  lines { name: "XLA Modules" events { metadata_id: 1 offset_ps: 0 duration_ps: 90000000 } }
}
planes { name: "/host:CPU" lines { name: "Stream of words" events { metadata_id: 1 duration_ps: 5000000 } } }
"""


def test_profile_sums_the_streams_of_gpus():
    space = jax.profiler.ProfileData.text_proto_to_serialized_xspace(GPU_SPACE)
    profile = read_profile(jax.profiler.ProfileData.from_serialized_xspace(space))
    assert profile.kernel_us == pytest.approx({"attend": 6, "combine": 4})
    assert list(profile.kernel_us) == ["attend", "combine"]
    assert profile.kernel_counts == {"attend": 2, "combine": 2}
    assert (profile.busy_us, profile.span_us) == pytest.approx((9, 10))
    assert profile.busy_share == pytest.approx(0.9)
    assert profile.rows(per=2)[0] == {"kernel": "attend", "us": 3.0, "count": 1.0}


def test_profiled_runs_on_a_cpu_and_finds_no_kernels():
    step = jax.jit(lambda x: x @ x)
    x = jnp.ones((8, 8))
    profile = profiled(lambda: step(x), runs=2)
    assert profile.kernel_us == {}
    assert profile.busy_share is None


def test_a_span_lets_go_of_each_output_before_the_next_run():
    outputs = []

    def run():
        assert all(output() is None for output in outputs)
        last = jnp.zeros(1000)
        outputs.append(weakref.ref(last))
        return last

    span_us(run, 3)
    assert len(outputs) == 3


def test_measure_divides_by_runs_and_calls():
    def run():
        time.sleep(0.002)
        return jnp.zeros(())

    timing = measure(run, calls=4, repeats=3, seconds=0.01)
    assert 500 <= timing.min_us <= timing.time_us < 2000
