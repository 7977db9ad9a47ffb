"""Triton's kernels compiled for GPUs that nobody here has, each by a process that interprets nothing."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the group `dev` has it")

from bench.triton_compiled import RESULTS
from jattn_kernels.triton.gpus import SHARED_MEMORY


def compiled(tmp_path, *arguments):
    """Rows of `python -m bench.triton_compiled`."""
    file = tmp_path / "rows.jsonl"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "bench.triton_compiled", "--out", str(file), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return read(file)


def read(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_decode_fits_the_smallest_gpu_without_spills(tmp_path):
    rows = compiled(tmp_path, "--main", "--only", "decode_page_1", "--capability", "8.6")
    assert [row["capability"] for row in rows] == ["8.6"]
    assert all(0 < row["shared"] <= row["limit"] and row["spilled"] == 0 for row in rows)


@pytest.mark.slow
def test_every_case_fits_every_gpu(tmp_path):
    rows = compiled(tmp_path)
    assert {row["capability"] for row in rows} == {"{}.{}".format(*capability) for capability in SHARED_MEMORY}
    assert all(row["shared"] <= row["limit"] for row in rows)
    names = {(row["case"], row["capability"]) for row in rows}
    assert names == {(row["case"], row["capability"]) for row in read(RESULTS)}


def test_table_has_every_kind_of_gpu_and_no_kernel_that_does_not_fit():
    rows = read(RESULTS)
    cases = {row["case"] for row in rows}
    assert len(rows) == len(cases) * len(SHARED_MEMORY)
    assert all(row["shared"] <= row["limit"] for row in rows)
