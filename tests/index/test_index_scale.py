"""scripts/bench/index_scale.py: its steps in their short form."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coder_plugin.index.search import Index

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "index_scale.py"


def test_the_steps_measure_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("index_scale", SCRIPT)
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "ROWS", 256)
    options = Namespace(
        items=900, dimensions=16, factory="IVF8,Flat", nprobe=[1, 8], segment_size=300, queries=12, centres=20, spread=0.6,
        folder=tmp_path,
    )  # fmt: skip
    results = {step: getattr(script, step)(options) for step in script.STEPS}
    assert json.loads(json.dumps(results)) == results
    assert results["build"]["segments"] == 4
    few, all_lists = results["search"]["by nprobe"]
    assert all_lists["recall@10"] == 1 >= few["recall@10"] > 0.1 and few["p95 ms"] >= few["p50 ms"] > 0
    index = Index(tmp_path / "index")
    every = np.concatenate(list(script.batches(options)))
    np.testing.assert_array_equal(index.vectors["images"].gather(np.arange(900))[:, 0], every)
    assert not np.array_equal(script.vectors(options, -1)[0], every[0])
    index.close()
