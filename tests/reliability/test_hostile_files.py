"""Nothing that is opened executes, fetches, writes elsewhere, hangs or ends in a traceback.

The cases are in ``hostile_*.py`` beside this file, the harness in ``hostile.py``. Of the cases whose names begin with the same
word, such as ``index``, every eighth runs by default; the others are slow.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.reliability.hostile import Case, run, run_case

FILES = sorted(path.stem for path in Path(__file__).parent.glob("hostile_*.py"))
CASES: list[Case] = [case for file in FILES for case in importlib.import_module(f"tests.reliability.{file}").CASES]
KINDS = [case.name.partition("-")[0] for case in CASES]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (KINDS[:number].count(kind) % 8 > 0))
        for number, (case, kind) in enumerate(zip(CASES, KINDS, strict=True))
    ],
)
def test_hostile_files(case: Case, tmp_path: Path) -> None:
    run_case(case, tmp_path / "root")


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "act, event",
    [
        (lambda: __import__("os").system("true"), "started a program"),
        (lambda: open("../outside-file", "w").close(), "opened for writing outside"),
        (lambda: __import__("os").mkdir("../new"), "changed outside"),
        (lambda: open("../outside/precious.txt").read(), "read outside"),
        (lambda: exec(compile("1", str(Path.cwd() / "code.py"), "exec")), "ran Python code"),
        (lambda: __import__("socket").create_connection(("127.0.0.1", 9), 0.1), "connected"),
        (lambda: __import__("huggingface_hub").hf_hub_download("somebody/evil", "config.json"), "connected"),
    ],
)
def test_the_harness_sees_what_a_command_does(act, event: str, tmp_path: Path) -> None:
    (tmp_path / "case").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious.txt").touch()
    outcome = run(act, (tmp_path / "case"), seconds=20)
    assert any(event in each for each in outcome.events), outcome


def test_the_harness_ends_a_command_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "case").mkdir()
    assert run(lambda: __import__("time").sleep(60), tmp_path / "case", seconds=0.3).status is None
