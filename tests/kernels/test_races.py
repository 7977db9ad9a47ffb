"""The tests' own search for races: JAX's verdict on each access, and an error in the end."""

import contextlib

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic.interpret.utils import Access
from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock
from jax._src.pallas.mosaic_gpu.interpret import race_detection_state

from jattn_kernels.mosaic.sm90.common import tiles
from tests.kernels.harness import races
from tests.kernels.harness.interpreter import interpreted


def drawn_accesses(rng, number):
    """By three threads that hear of each other now and then: whose, when, in which way, of which buffer, of what."""
    clocks = [NpVectorClock(4) for _ in range(3)]
    for _ in range(number):
        thread, other = rng.choice(3, 2, replace=False)
        if rng.random() < 0.7:
            clocks[thread].update(clocks[other])
        if rng.random() < 0.9:  # else at the time of the one before
            clocks[thread].inc(int(thread))
        start, size = (rng.integers(0, most, 2).tolist() for most in (6, 4))
        rows = start[0] if size[0] == 1 else slice(start[0], start[0] + size[0], 1)
        part = Access((rows, slice(start[1], start[1] + size[1])))
        yield int(thread), clocks[thread].copy(), bool(rng.random() < 0.4), int(rng.integers(2)), part


@pytest.mark.parametrize("seed", range(5))
def test_each_access_races_where_jax_says_so(seed):
    states = [module.GPURaceDetectionState(num_cores=3) for module in (races, race_detection_state)]
    verdicts = []
    for thread, clock, writes, buffer, part in drawn_accesses(np.random.default_rng(seed), 80):
        for state in states:
            state.races_found = False
            (state.check_write if writes else state.check_read)(thread, clock, buffer, part)
        verdicts.append([state.races_found for state in states])
    ours, jaxs = zip(*verdicts, strict=True)
    assert ours == jaxs
    assert {True, False} == set(ours)


@pytest.mark.parametrize("waits", [True, False])
def test_a_race_is_an_error_in_the_end(waits, capsys):
    def body(out, shared, written):
        @pl.when(lax.axis_index("warpgroup") == 0)
        def write():
            shared[...] = jnp.full((128,), 1.0)
            plgpu.barrier_arrive(written)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def read():
            if waits:
                plgpu.barrier_wait(written)
            out[...] = shared[...]
            if not waits:
                plgpu.barrier_wait(written)

    scratch = (plgpu.SMEM((128,), jnp.float32), plgpu.Barrier())
    expected = contextlib.nullcontext() if waits else pytest.raises(AssertionError, match="a kernel has a race")
    with expected, interpreted():
        run = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
            scratch_types=scratch,
            num_threads=2,
            thread_name="warpgroup",
            interpret=tiles.interpret_params(),
        )
        jax.jit(run)()
    assert ("RACE DETECTED" in capsys.readouterr().out) != waits
