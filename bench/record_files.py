"""The files of measurements: where they lie, and their rows. Imports the standard library alone."""

import json
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
