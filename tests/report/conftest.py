"""A browser, where there is one."""

from __future__ import annotations

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def browser() -> str:
    """The path of a Chromium or Chrome."""
    names = (os.environ.get("CHROME", ""), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    found = next((path for path in map(shutil.which, filter(None, names)) if path), None)
    if found is None:
        pytest.skip("no Chromium or Chrome: install one, or name it with $CHROME")
    return found
