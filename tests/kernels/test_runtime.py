"""Compiled kernels find what they call."""

import os
import subprocess
import sys

import pytest

from jattn_kernels.mosaic import runtime


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    package = tmp_path / "jax_cuda13_plugin"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(runtime._VARIABLE, raising=False)
    return package


def test_runtime_is_named_where_the_plugin_has_it(plugin):
    runtime.name_runtime()
    assert runtime._VARIABLE not in os.environ
    library = plugin / "libmosaic_gpu_runtime.so"
    library.touch()
    runtime.name_runtime()
    assert os.environ[runtime._VARIABLE] == str(library)
    os.environ[runtime._VARIABLE] = "the user's own"
    runtime.name_runtime()
    assert os.environ[runtime._VARIABLE] == "the user's own"


def test_kernels_are_not_imported_before_one_is_traced():
    program = "import sys, jattn_kernels; assert 'jax.experimental.pallas' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.gpu
def test_the_runtime_is_the_one_that_mosaic_names(monkeypatch):
    monkeypatch.delenv(runtime._VARIABLE, raising=False)
    runtime.name_runtime()
    found = os.environ[runtime._VARIABLE]
    from jax.experimental.mosaic.gpu import core

    assert found == str(core.RUNTIME_PATH)
