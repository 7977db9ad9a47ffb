"""Which cases are among the default tests, and which in the slow ones alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def often(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """All of them, those that are not chosen in the slow tests alone."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]
