"""The mailbox of GPUs that share a model: what they exchange, on as many as there are; elsewhere there is none."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import mailbox as module
from jattn.device_mesh import OnAll
from jattn.mailbox import mailbox_of, refuses
from jattn.parallel import ONE_DEVICE, Parallel

TWO = Parallel("tensor", 2)


def test_devices_that_are_no_gpus_have_no_mailbox():
    assert refuses(ONE_DEVICE) == "Kernels exchange between several NVIDIA GPUs."
    if jax.default_backend() != "gpu":
        assert mailbox_of(TWO) is None


@pytest.mark.parametrize(
    ("parallel", "reached", "lacking", "sentence"),
    [
        (Parallel("tensor", 3), True, None, r"Kernels exchange between 2, 4, 8 GPUs, not 3\."),
        (TWO, False, None, r"GPU 0 does not reach GPU 1's memory, by the driver\."),
        (TWO, True, "`triton` needs triton.", "`triton` needs triton."),
        (TWO, True, None, None),
    ],
)
def test_gpus_that_cannot_exchange_say_why(monkeypatch, parallel, reached, lacking, sentence):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(module, "_reaches", lambda device, other: reached)
    monkeypatch.setattr(module, "missing", lambda: lacking)
    found = refuses(parallel)
    assert found == sentence if sentence is None else re.fullmatch(sentence, found)


@pytest.fixture(scope="module", params=[2, 4, 8])
def parallel(request):
    """GPUs that share a model."""
    found = Parallel("tensor", request.param)
    if len(jax.devices()) < found.size or mailbox_of(found) is None:
        pytest.skip(f"needs {found.size} GPUs that store into each other's memory")
    return found


@pytest.fixture
def mailbox(parallel):
    return mailbox_of(parallel)


@functools.cache
def program(parallel, kind, shape, dtype):
    """One exchange, as all devices run it."""

    def run(parts, x, scale, table):
        connected = parallel.connected(table)
        if kind == "sum":
            return connected.all_reduce(parts[0])
        if kind == "logits":
            return connected.gather_logits(parts[0].astype(jnp.float32))
        return connected.add_and_norm(x, parts[0], scale, eps=1e-5, offset=0.0, layer_index=None)

    return jax.jit(OnAll(run, parallel, takes_shares=(True, False, False, True), gives_shares=True))


@jax.jit
def same(x, y):
    """Whether all their numbers are equal; on the device, as thousands of results are many bytes."""
    return (x == y).all()


def drawn(rng, devices, kind, shape, dtype):
    """The arguments of a program, and what each device must give: sums in the devices' order, rounded once."""
    parts = rng.standard_normal((devices, *shape)).astype(jnp.dtype(dtype))
    x, scale = (rng.standard_normal(size).astype(jnp.dtype(dtype)) for size in (shape, shape[-1:]))
    summed = functools.reduce(np.add, parts.astype(np.float32)).astype(parts.dtype)
    if kind == "logits":
        return (parts, x, scale), np.concatenate(parts.astype(np.float32), axis=-1)
    total = summed if kind == "sum" else (x.astype(np.float32) + summed.astype(np.float32)).astype(x.dtype)
    return (parts, x, scale), total


@pytest.mark.gpu
def test_gpus_exchange_for_thousands_of_programs_without_a_wrong_bit(parallel, mailbox):
    """Of mixed kinds, shapes and dtypes, not waited for; every result of every device is compared."""
    rng = np.random.default_rng(0)
    kinds = [("sum", shape, "bfloat16") for shape in ((1, 4096), (64, 4096), (2048, 4096), (9000, 4096), (3, 40))]
    kinds += [("norm", shape, "bfloat16") for shape in ((1, 4096), (64, 4096), (300, 2880))]
    kinds += [("norm", (1, 256), "float32")]
    kinds += [(kind, (5, 1000), dtype) for kind in ("sum", "norm") for dtype in ("float16", "float32")]
    kinds += [("logits", shape, "float32") for shape in ((1, 1000), (64, 8000))]
    drawings = {kind: drawn(rng, parallel.size, *kind) for kind in kinds}
    devices = jax.devices()[: parallel.size]
    cases = {
        kind: (arguments, {device: jax.device_put(total, device) for device in devices})
        for kind, (arguments, total) in drawings.items()
    }
    for kind, (arguments, _) in cases.items():
        jax.block_until_ready(program(parallel, *kind)(*arguments, mailbox.loopback))
    pending = []
    for number in range(3000):
        kind = kinds[rng.integers(len(kinds))]
        arguments, totals = cases[kind]
        pending.append((kind, totals, program(parallel, *kind)(*arguments, mailbox.table)))
        if len(pending) == 25 or number == 2999:
            for kind, totals, found in pending:
                given = found[0] if kind[0] == "norm" else found
                right = [same(shard.data, totals[shard.device]) for shard in given.addressable_shards]
                assert all(map(bool, right)), kind
                if kind[0] == "norm":
                    first, *others = (np.asarray(shard.data) for shard in found[1].addressable_shards)
                    for other in others:
                        np.testing.assert_array_equal(other, first)
            pending.clear()
    mailbox.check()


@pytest.mark.gpu
def test_a_gpu_that_waits_in_vain_says_so_and_goes_on_once_the_mailbox_is_emptied(parallel, mailbox):
    kind = ("sum", (8, 4096), "bfloat16")
    arguments, total = drawn(np.random.default_rng(1), parallel.size, *kind)
    jax.block_until_ready(program(parallel, *kind)(*arguments, mailbox.table))

    def alone(part, table):
        return parallel.connected(table).all_reduce(part)

    first = jax.devices()[0]
    row = np.asarray(mailbox.table.addressable_shards[0].data)
    part, table = jax.device_put((arguments[0][0], row), first)
    waited = jax.jit(alone)(part, table)  # the other devices run nothing
    assert np.isnan(np.asarray(waited).astype(np.float32)).all()
    sentence = f"Device 0 of {parallel.size} that share the model waited some seconds for another one"
    with pytest.raises(RuntimeError, match=sentence):
        mailbox.check()
    mailbox.empty()
    mailbox.check()
    for shard in program(parallel, *kind)(*arguments, mailbox.table).addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), total)
