"""The files of measurements: where they lie, and their rows. Imports the standard library alone."""

import ast
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "bench" / "results" / "h200"

Row = dict[str, Any]


def read_rows(file: Path) -> list[Row]:
    """The objects of a file, one a line; none if there is no file."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def code_sha(files: Iterable[Path], root: Path) -> str:
    """sha256 over the code of files, comments and docstrings left out."""
    digest = hashlib.sha256()
    for file in sorted(files):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        text = f"{file.relative_to(root).as_posix()}\n{ast.dump(tree)}".encode()
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest()
