"""What XLA makes of a step that two GPUs share, on a machine without one: its plugin for CUDA compiles ahead."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.jattn.harness.two_gpus import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the wheels of jax[cuda13]"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    command = [sys.executable, "-m", "tests.jattn.harness.two_gpus", str(folder)]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_with_a_mailbox_no_collective_of_xla_is_left(compiled):
    assert compiled["kernels"]["all_reduces"] == compiled["kernels"]["all_gathers"] == 0
    assert "kCollective" not in compiled["kernels"]["thunks"]
    assert compiled["xla"]["all_reduces"] > 0


def test_kernels_begin_when_those_before_them_have_ended_whatever_xla_flags_say(compiled):
    assert [line for line in compiled["kernels"]["told"] if "_pdl" in line] == [
        "xla_gpu_enable_pdl: false",
        "xla_gpu_enable_pdl_launch: false",
    ]


def test_all_kernels_of_the_step_are_one_graph(compiled):
    graphs = {name: compiled[name]["thunks"].count("kCommandBuffer") for name in compiled}
    assert graphs["kernels"] == 1
    assert graphs["xla"] > 1
    for line in compiled["kernels"]["thunks"].splitlines():
        if "kCustomCall" in line:
            assert line.startswith("    ")  # in a graph
