"""A browser, where there is one; charts of equal numbers are drawn once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from coder_plugin.report import charts


@pytest.fixture(scope="package", autouse=True)
def charts_of_equal_numbers() -> Iterator[None]:
    """Reports of one run have the same curves: to draw them takes longer than the rest."""
    drawn: dict[str, Any] = {}

    def lines(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, options))
        if key not in drawn:
            drawn[key] = charts.lines(*arguments, **options)
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("compare", "curves"):
            patch.setattr(f"coder_plugin.report.{module}.lines", lines)
        yield


@pytest.fixture(scope="session")
def browser() -> str:
    """The path of a Chromium or Chrome."""
    names = (os.environ.get("CHROME", ""), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    found = next((path for path in map(shutil.which, filter(None, names)) if path), None)
    if found is None:
        pytest.skip("no Chromium or Chrome: install one, or name it with $CHROME")
    return found
