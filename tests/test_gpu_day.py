"""scripts/bench/gpu_day.py: its driver with made-up stages, and all of its stages in their tiny form."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench" / "gpu_day.py"
RESULT = "import json, sys; open({file!r}, 'a').write(json.dumps({{'bench': 'made', 'value': 1}}) + '\\n'); "


@pytest.fixture(scope="module")
def gpu_day() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_day", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_day"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_stages_that_fail_or_take_too_long_keep_their_results_and_the_next_one_runs(gpu_day, tmp_path) -> None:
    options = argparse.Namespace(out=tmp_path, dry=True)
    file = str(tmp_path / "results.jsonl")
    child = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    wait = f"print('it waits'); import subprocess, time; {child}; open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid));"
    programs = {
        "fails": RESULT + "raise SystemExit(3)",
        "stops": RESULT + f"open({file!r}, 'a').write('half a li'); sys.stdout.flush(); {wait} time.sleep(60)",
        "crashes": "import os; os.abort()",
        "goes on": RESULT + "print('the last words')",
        "late": RESULT,
    }
    stages = [
        gpu_day.Stage(name, 3.0 if name == "stops" else 30.0, ("-c", "raise SystemExit(9)"), ("-c", code.format(file=file)))
        for name, code in programs.items()
    ]
    log = io.StringIO()
    began = time.monotonic()
    endings = gpu_day.run(stages[:4], options, log, until=began + 60)
    assert endings == ["failed with status 3", "stopped after 3 s", "failed with status -6", "ok"]
    assert time.monotonic() - began < 30
    left = Path("/proc", (tmp_path / "child").read_text(), "stat")  # the stopped stage's own child
    assert not left.exists() or left.read_text().rpartition(")")[2].split()[0] in "ZX"
    assert gpu_day.run(stages[4:], options, log, until=time.monotonic() + 1) == ["skipped: the time is used up"]
    lines = gpu_day.read(Path(file))
    assert sum(line.get("bench") == "made" for line in lines) == 3
    assert [line["stage"] for line in lines if "stage" in line] == [name for name in programs if name != "stops"]  # half a line
    assert "it waits" in log.getvalue() and "the last words" in log.getvalue()


#: Stages that compile nothing and train nothing.
QUICK = ("rooflines", "m_dcl", "search")


@pytest.mark.parametrize("stages", [QUICK, pytest.param((), marks=pytest.mark.slow)], ids=["quick", "all"])
def test_every_stage_runs_in_its_tiny_form(stages, tmp_path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--dry", "--out", str(tmp_path), *(["--stages", *stages] if stages else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, env=environment)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    endings = {line["stage"]: line["ending"] for line in lines if "stage" in line}
    every = stages or (*QUICK, "versions", "tests", "dcl", "step", "schedule")
    assert endings == dict.fromkeys(every, "ok"), done.stdout[-4000:]
    forms = {line["form"]: line for line in lines if "form" in line}
    assert {"InfoNCE", "reference", "tiled", "product"} <= forms.keys()
    assert all(line["seconds"] > 0 for line in forms.values())
    if not stages:
        assert {"ClipLoss bfloat16", "one-product InfoNCE bfloat16"} <= forms.keys()
        errors = {name: line["error"] for name, line in forms.items() if line.get("error") is not None}
        assert errors["tiled float32"] < 1e-5 and errors["tiled bfloat16"] < 2e-2
        assert "aten::" in (tmp_path / "profile.txt").read_text()
    assert "DCL 32,768 x 1024, tiled bfloat16" in done.stdout and "DOES NOT HOLD" not in done.stdout
