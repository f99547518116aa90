"""open_clip's own tests: what passes without us passes unmodified with our adapter active (scripts/upstream_tests.sh)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

CHECKOUT = os.environ.get("CODER_OPEN_CLIP_TESTS")
SCRIPT = Path(__file__).parents[2] / "scripts" / "upstream_tests.sh"
#: What trains or loads whole models takes minutes each; what asks the hub fails offline.
SMALL = "not training_simple and not inference and not pretrained_text_encoder"


def passed(report: Path, *, plain: bool, only: str) -> set[str]:
    """Names of the tests that pass."""
    environment = {**os.environ, "PYTHON": sys.executable, "PLAIN": "1" if plain else "", "CUDA_VISIBLE_DEVICES": ""}
    argv = [str(SCRIPT), "--timeout", "900", "-k", only, f"--junitxml={report}"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: some fail
    assert ("coder-plugin's" in done.stdout) != plain, "the plugin's line in pytest's header"
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}" for case in cases if not list(case)}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(CHECKOUT is None, reason="CODER_OPEN_CLIP_TESTS names no checkout of open_clip with its tests")
@pytest.mark.parametrize("only", [SMALL, f"not ({SMALL})"], ids=["small", "whole-models"])
def test_what_passes_without_us_passes_with_us(tmp_path: Path, only: str) -> None:
    without = passed(tmp_path / "without.xml", plain=True, only=only)
    with_us = passed(tmp_path / "with.xml", plain=False, only=only)
    assert without and without <= with_us, sorted(without - with_us)
