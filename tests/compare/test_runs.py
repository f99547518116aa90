"""Real processes: commands of one's own, runs that are read, and what ends with what."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coder_plugin.cli import main
from coder_plugin.compare.plan import make_plans
from coder_plugin.compare.runs import Runs, start
from coder_plugin.errors import CoderError

SCRIPT = """
import json, random, sys
loss, rate, seed, output = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if loss == "siglip":
    sys.exit("error: no loss of this name")
draw = random.Random(seed)
ranks = [draw.choice([0, 0, 4, 20]) if loss == "dcl" else draw.choice([0, 4, 20, 20]) for _ in range(60)]
val = {"i2t_ranks": ranks, "t2i_ranks": ranks, "image_of_text": list(range(60))}
print("epoch 1")
json.dump({"held_aside": [100 + 1000 * rate, 90], "seconds": [60, 120], "val": val}, open(output, "w"))
"""


def test_a_command_of_ones_own_makes_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    plan = tmp_path / "plan.toml"
    rows = "".join(f'[[rows]]\nloss = "{loss}"\n' for loss in ("clip", "dcl", "siglip"))
    command = f"python '{tmp_path}/train.py' {{loss}} {{lr}} {{seed}} {{output}}"
    plan.write_text(f'[train]\nlr = [0.001, 0.01]\ncommand = "{command}"\n{rows}')
    arguments = ["compare", str(plan), "--trust-plan", "--output", str(tmp_path / "out"), "--jobs", "3"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["chosen"] for row in found["rows"].values()] == [{"lr": 0.1}] * 2, "one step beyond 0.01"
    assert found["data"] == "the commands' own validation data"
    assert found["rows"]["dcl"]["minutes"] == 2 and found["rows"]["dcl"]["best_epochs"] == [1, 1, 1]
    assert "use dcl at lr 0.1" in text
    assert "siglip is left out: the run ended with status 1: error: no loss of this name" in text
    monkeypatch.setattr("coder_plugin.compare.page.write_comparison", lambda *_: "not written again")
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("output.json"))
    assert main(arguments) == 0
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("output.json")) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must hold held_aside"),
        ('{"held_aside": [], "val": {}}', "must hold held_aside"),
        ('{"held_aside": [1], "val": {"i2t_ranks": [0], "t2i_ranks": [0]}}', "val has no list 'image_of_text'"),
    ],
)
def test_what_a_command_writes_is_checked(tmp_path: Path, content: str, message: str) -> None:
    [plan] = make_plans([{"loss": "clip"}, {"loss": "dcl"}], {"command": "python x.py {output}"}, seeds=1)
    point, runs = plan.rows[0].points()[0], Runs(tmp_path)
    runs.path(point).mkdir(parents=True)
    (runs.path(point) / "output.json").write_text(content)
    with pytest.raises(CoderError, match=message):
        runs.result(point)


def test_runs_at_a_time_share_out_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(jobs: int) -> str:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        code = "import os; print(os.environ.get('OMP_NUM_THREADS'))"
        assert start([sys.executable, "-c", code], log, jobs).wait() == 0
        return log.read_text().strip()

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads(jobs) for jobs in (1, 2, 3, 9)] == ["None", "4", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(2) == "3", "what the user has set stays"


def test_a_run_ends_with_a_comparison_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from coder_plugin.compare.runs import start; "
        "words = [sys.executable, '-c', 'import time; time.sleep(600)']; "
        f"print(start(words, Path({str(tmp_path / 'log')!r})).pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    for _ in range(100):
        try:
            os.kill(child, 0)
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":  # whoever inherited it has not noticed yet
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the run goes on")


def test_a_running_process_is_not_read(tmp_path: Path) -> None:
    [plan] = make_plans([{"loss": "clip"}, {"loss": "dcl"}], {"command": "python x.py {output}"}, seeds=1)
    point, runs, seen = plan.rows[0].points()[0], Runs(tmp_path), []
    word = "import sys, time; file = open(sys.argv[1], 'w'); file.write('{'); file.flush(); time.sleep(0.5); file.write('}')"
    runs.command = lambda _: [sys.executable, "-c", word, str(runs.path(point) / "output.json")]  # type: ignore[method-assign]
    sleep = time.sleep

    def look(seconds: float) -> None:
        seen.append(runs.result(point))
        sleep(0.1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("coder_plugin.compare.runs.time.sleep", look)
        with pytest.raises(CoderError, match="must hold held_aside"):
            runs.run([point], lambda *_: None)
    assert seen and not any(seen)
