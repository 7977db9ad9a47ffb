"""The kernels that XLA makes around the layers of a step, on a machine without a GPU: its plugin compiles ahead."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the wheels of jax[cuda13]"),
]


@pytest.fixture(scope="module")
def rows():
    command = [sys.executable, "-m", "bench.step_kernels", "--only", "llama_fp8_b64", "--only", "llama_bf16_b1"]
    told = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "XLA_FLAGS")}
    done = subprocess.run(command, env=environment | told, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return {row.pop("step"): row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(("step", "most"), [("llama_fp8_b64", 21), ("llama_bf16_b1", 12)])
def test_few_kernels_of_xla_are_around_the_layers(rows, step, most):
    """A dozen of 64 rows' make the schedule of decode."""
    assert rows[step]["xla_outside"] <= most
    assert "copy" not in rows[step]["xla_kernels"]


def test_a_layer_has_the_kernels_that_it_asks_for(rows):
    """Norms, products, attention and its merge; in fp8 rows are rounded twice, in bf16 XLA gates."""
    fp8, bf16 = rows["llama_fp8_b64"], rows["llama_bf16_b1"]
    assert (fp8["other_of_a_layer"], fp8["xla_of_a_layer"]) == (10, 0)
    assert (bf16["other_of_a_layer"], bf16["xla_of_a_layer"]) == (9, 1)
