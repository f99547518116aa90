"""The experiments import each other by name, as when one is run."""

from __future__ import annotations

import pytest

from tests.experiments.plans import EXPERIMENTS


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
