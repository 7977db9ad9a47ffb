"""Which cases are among the default tests, and which in the slow ones alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that is in the slow tests alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def often(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """All of them, those that are not chosen in the slow tests alone."""
    return [case if case in chosen else slow(case) for case in cases]


def often_together(cases: Iterable[tuple[Any, ...]], chosen: Collection[tuple[Any, ...]]) -> list[Any]:
    """Likewise, where a case is the values of several arguments."""
    return [case if case in chosen else slow(*case) for case in cases]
