"""Programs that talk to servers like ours, each in an environment of its own: their needs would quarrel with jattn's.

`$JATTN_CLIENTS` is a folder of such environments, made by `uv venv NAME && uv pip install -p NAME PACKAGES`.
"""

import os
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest


def checkpoint():
    """The folder of the bundled checkpoint, from which clients read the tokenizer."""
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    return point.load()()


def called(environment, packages, program, *arguments, folder):
    """What a program prints that must end well; the test is skipped where it is not installed.

    Args:
        environment: Folder in `$JATTN_CLIENTS`.
        packages: What must be installed there.
        folder: It runs there, and keeps there what it keeps.
    """
    path = Path(os.environ.get("JATTN_CLIENTS", "clients"), environment, "bin", program).absolute()
    if not path.exists():
        pytest.skip(f"`{packages}` must be installed in $JATTN_CLIENTS/{environment}; there is no {path}.")
    own = {"HF_HOME": str(folder / "hf"), "HOME": str(folder), "DO_NOT_TRACK": "1", "OPENAI_API_KEY": "none"}
    command = [path, *map(str, arguments)]
    ended = subprocess.run(command, cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout
