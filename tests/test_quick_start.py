"""The quick start as a reader follows it: every command and block of Python in the page's order, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation import ROOT, blocks


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_quick_start_runs_as_printed(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "coder-plugin").write_text(f'#!/bin/bash\nexec "{sys.executable}" -m coder_plugin.cli "$@"\n')
    (programs / "coder-plugin").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    printed = ""
    for block in blocks(ROOT / "docs" / "quickstart.md", "bash", "python"):
        command = ["bash", "-e", "-c", block.text] if block.language == "bash" else [sys.executable, "-c", block.text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2500)
        assert done.returncode == 0, f"{block.name}: {done.stderr[-3000:]}"
        printed += done.stdout
    rows = [line.split() for line in printed.splitlines() if line.startswith("last (epoch 4)")]
    assert rows and float(rows[0][9]) > 300, rows  # R@sum; an untrained model has 6
    for name in ("logs/scenes/report.html", "logs/scenes/export/best", "logs/scenes/index", "results.html"):
        assert (tmp_path / name).exists(), name
    assert "large pink striped cross" in (tmp_path / "results.html").read_text()
