"""A pytest plugin: each test's outcome is written as soon as it is known, and what has passed before is left out.

pytest -p bench.outcomes --outcomes FILE      a time limit loses nothing that is done: the next run takes what is left
"""

import json
from pathlib import Path

import pytest

from bench.record_files import Row, read_rows


def read_outcomes(file: Path) -> dict[str, Row]:
    """By name of the test, the last outcome in the file; none if there is no file."""
    return {row["name"]: row for row in read_rows(file)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="file of the outcomes, one JSON object a line")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("outcomes")
    assert isinstance(file, Path)
    config.pluginmanager.register(Outcomes(file, is_writer=not hasattr(config, "workerinput")))


class Outcomes:
    """Of one run.

    Args:
        is_writer: Of several processes the one that hears from all.
    """

    def __init__(self, file: Path, *, is_writer: bool):
        self._file, self._is_writer = file, is_writer

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = {name for name, row in read_outcomes(self._file).items() if row["outcome"] in ("passed", "skipped")}
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test that passes has three reports; one that is skipped or breaks before or after its call ends in another.
        if not self._is_writer or (report.passed and report.when != "call"):
            return
        row: Row = {"case": "test", "impl": "jattn-tests", "name": report.nodeid, "outcome": report.outcome}
        if report.skipped:
            row["why"] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
