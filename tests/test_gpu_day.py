"""scripts/bench/gpu_day.py: its driver with made-up stages, and its stages in their tiny form."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests import fresh

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench" / "gpu_day.py"
RESULT = "import json; open({file!r}, 'a').write(json.dumps({{'case': 'made', 'value': 1}}) + '\\n'); "


@pytest.fixture(scope="module")
def gpu_day() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_day", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stages_that_fail_or_take_too_long_keep_their_results_and_the_next_one_runs(gpu_day, tmp_path, capsys) -> None:
    options = argparse.Namespace(out=tmp_path, dry=False)
    child = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    wait = f"import subprocess, sys, time; {child}; open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); child.wait()"
    programs = {
        "fails": RESULT + "raise SystemExit(3)",
        "stops": RESULT + "print('it waits', flush=True); open({file!r}, 'a').write('half a li'); " + wait,
        "crashes": "import os; os.abort()",
        "goes on": RESULT + "print('the last words')",
        "late": RESULT,
    }
    stages = [
        gpu_day.Stage(name, 2.2 if name == "stops" else 30.0, ("-c", code.format(file=str(tmp_path / "results.jsonl"))), "", "")
        for name, code in programs.items()
    ]
    begun = time.monotonic()
    endings = gpu_day.run(stages[:4], options, until=begun + 60)
    assert endings == ["failed with status 3", "stopped after 2 s", "failed with status -6", "ok"]
    assert time.monotonic() - begun < 40
    left = Path("/proc", (tmp_path / "child").read_text(), "stat")  # the stopped stage's own child
    assert not left.exists() or left.read_text().rpartition(")")[2].split()[0] in "ZX"
    assert gpu_day.run(stages[4:], options, until=time.monotonic() + 1) == ["skipped: the time is used up"]
    lines = gpu_day.read(tmp_path / "results.jsonl")
    assert sum(line.get("case") == "made" for line in lines) == 3
    assert [line["stage"] for line in lines if "stage" in line] == list(programs)
    for text in ((tmp_path / "log.txt").read_text(), capsys.readouterr().out):
        assert "it waits" in text and "the last words" in text


def test_figures_are_compared_with_goals(gpu_day) -> None:
    lines = [
        {"bench": "bank_step", "machine": {}},
        {"case": "m_dcl 128 x 1048576", "seconds": {"InfoNCE": 1.0, "tiled": 2e-3}},
        {"case": "m_dcl 4096 x 1048576", "seconds": {"tiled": 0.07}, "peak_bytes": {"tiled": 2e8}},
        {"case": "ViT-B-32, batch 256, amp_bf16", "ratio": {"coder": 1.5}},
    ]
    table = {line[:48].strip(): line[48:].split() for line in gpu_day.compare(lines).splitlines()}
    assert table["M-DCL 128 x 1M, tiled, ms"] == ["2.1", "2", "holds"]
    assert table["M-DCL 4096 x 1M, tiled, ms"] == ["68", "70", "DOES", "NOT", "HOLD"]
    assert table["M-DCL 4096 x 1M, tiled, GB beyond the banks"] == ["1", "0.2", "holds"]
    assert table["coder step / clip step, ViT-B-32 at 256"] == ["1.45", "1.5", "DOES", "NOT", "HOLD"]
    assert table["the paper's schedule, steps alone, min"] == ["6", "–"]


@pytest.mark.slow  # tests/test_bench.py runs its scripts
@pytest.mark.parametrize("stages", [["bank_step"], []], ids=["quick", "all"])
def test_every_stage_runs_in_its_tiny_form(gpu_day, stages, tmp_path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(SCRIPT), "--dry", "--out", str(tmp_path), *(["--stages", *stages] if stages else [])]
    done = fresh.run(command, timeout=590, env=environment)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines() if line]
    endings = {line["stage"]: line["ending"] for line in lines if "stage" in line}
    names = stages or [stage.name for stage in gpu_day.STAGES]
    assert endings == dict.fromkeys(names, "ok") and done.returncode == 0, done.stdout[-4000:]
    cases = {line["case"]: line for line in lines if "seconds" in line}
    assert {"reference", "tiled"} <= cases["m_dcl 64 x 512"]["ratio"].keys()
    if not stages:
        assert cases["dcl 64 x 32"]["error"]["tiled bfloat16"] < 2e-2 and cases["dcl 64 x 32"]["error"]["tiled tf32"] < 1e-5
        assert "aten::" in (tmp_path / "profile.txt").read_text() and len(cases) == 6
    assert "DCL 32,768 x 1024, tiled bfloat16" in done.stdout and "DOES NOT HOLD" not in done.stdout
