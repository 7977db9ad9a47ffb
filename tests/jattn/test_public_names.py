"""`jattn` shows its names to `dir` and to type checkers, and imports nothing heavy until one is used."""

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import jattn


def test_every_name_is_there_and_listed():
    assert dir(jattn) == sorted(jattn.__all__)
    assert all(getattr(jattn, name) is not None for name in jattn.__all__)
    assert jattn.__version__ == version("jattn")
    assert {"LLM", "SamplingParams"} < set(jattn.__all__)


def test_type_checkers_see_the_same_names():
    stub = ast.parse((Path(jattn.__file__).with_suffix(".pyi")).read_text(encoding="utf-8"))
    homes = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert homes == jattn._HOMES
    assert {*homes, "__version__"} == set(jattn.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jattn' has no attribute 'nonsense'"):
        jattn.nonsense  # noqa: B018


def test_names_are_listed_without_jax():
    program = "import sys, jattn; dir(jattn); jattn.EngineConfig; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_script_beside_a_folder_of_that_name_finds_the_package(tmp_path):
    """As one beside a clone does: a folder without `__init__.py` is a package too, but the last to be taken."""
    (tmp_path / "jattn").mkdir()
    script = tmp_path / "script.py"
    script.write_text("import jattn; print(jattn.__version__)")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, jattn.__version__), result.stderr
