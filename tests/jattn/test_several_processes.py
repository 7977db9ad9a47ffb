"""A model that the devices of two processes share, as on two hosts: both write what one device in one process does."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jattn.checkpoint import Checkpoint
from tests.jattn.harness.one_of_processes import CHANGES, NUM_DEVICES, NUM_PROCESSES, written
from tests.jattn.harness.several_devices import engine_of, write_llama
from tests.jattn.harness.tiny import VOCAB

SECONDS = 300


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Checkpoint(write_llama(tmp_path_factory.mktemp("checkpoints") / "llama", vocab=VOCAB))


def found_by_each(checkpoint, folder, *names):
    """What the processes say, in their order; `facts`, or what they write with the changes of names."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={NUM_DEVICES // NUM_PROCESSES}")
    own = {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    own |= {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    program = [sys.executable, "-m", "tests.jattn.harness.one_of_processes", str(port)]
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(NUM_PROCESSES):
            said = stack.enter_context(open(folder / f"{number}.txt", "w"))
            process = subprocess.Popen(
                [*program, str(number), str(checkpoint.path), *names],
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=os.environ | own,
                cwd=Path(__file__).parents[2],
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)  # the others, if one does not end
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    for number, process in enumerate(processes):
        assert process.returncode == 0, (folder / f"{number}.txt").read_text()[-3000:]
    return [json.loads(output.splitlines()[-1]) for output in outputs]  # behind what Gloo says


def test_two_processes_write_what_one_device_writes(llama, tmp_path):
    """Each reads its own shares, and has pages for as many as the other has room for."""
    found = found_by_each(llama, tmp_path)
    expected = written("plain", engine_of(llama, 1))
    assert [each["plain"] for each in found] == [expected] * NUM_PROCESSES
    assert [each["ranks"] for each in found] == [[0, 1], [2, 3]]
    assert [each["num_pages"] for each in found] == [7_000 // 512] * NUM_PROCESSES
    for each in found:
        assert not each["has_mailbox"]
        assert each["num_named"] == 0
        devices, background, server = each["refused"]
        assert "number of devices of all 2 processes of `jax.distributed`, 4. Got 3." in devices
        assert "`compile_in_background` must be False where several processes share the model" in background
        assert "A server's model must be of one process" in server


@pytest.mark.slow
def test_whatever_an_engine_does_two_processes_do(llama, tmp_path):
    names = sorted(CHANGES)
    expected = {name: written(name, engine_of(llama, 1, **CHANGES[name])) for name in names}
    assert found_by_each(llama, tmp_path, *names) == [expected] * NUM_PROCESSES
