"""What is packed on the host is the same on the device, and a launch sends one array."""

import jax
import numpy as np

from jattn.serving.executor.batches import decode_batch, prefill_batch
from jattn.serving.steps.packing import Packing, on_packed, packed
from tests.jattn.harness.tiny import CONFIG, plans_of


def test_packed_arrays_come_out_as_they_went_in():
    config = plans_of(CONFIG).config
    rng = np.random.default_rng(0)

    def random(leaf):
        bits = rng.integers(-(2**31), 2**31, size=leaf.shape).astype(np.int32)
        return bits > 0 if leaf.dtype == np.bool_ else bits.view(leaf.dtype)

    sent = jax.tree.map(random, (decode_batch([], 3, config), prefill_batch([], 8, config, "full")))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(sent)} == {"bool", "int32", "uint32", "float32"}
    arrived = jax.jit(Packing.of(sent).unpacked)(packed(sent))
    assert jax.tree.structure(arrived) == jax.tree.structure(sent)
    for leaf, other in zip(jax.tree.leaves(arrived), jax.tree.leaves(sent), strict=True):
        assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
        assert np.asarray(leaf).tobytes() == other.tobytes()


def test_step_on_packed_takes_what_it_took_apart():
    held, sent = np.arange(3.0, dtype=np.float32), (np.float32([1, 2, 3]), np.bool_([True, False, True]))
    given = jax.jit(lambda *arguments: on_packed(lambda *a: a, Packing.of(sent), *arguments))(held, packed(sent))
    assert [np.asarray(leaf).tolist() for leaf in given] == [[0, 1, 2], [1, 2, 3], [True, False, True]]


def test_every_launch_takes_one_array_of_the_host():
    for key, plan in plans_of(CONFIG).executor.compiled_steps.items():
        *_, sent = plan.arguments
        assert isinstance(sent, np.ndarray), key
        assert len(plan.arguments) == {"note": 2, "score": 3}.get(key.kind, 4)
