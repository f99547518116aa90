"""Which cases of a parametrized test run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """The first case and every third after it; the others are slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.slow] if number % every else [])
        for number, case in enumerate(cases)
    ]
