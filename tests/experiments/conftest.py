"""The experiments import each other by name, as when one is run."""

from __future__ import annotations

from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "scripts" / "experiments"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
