"""The plan files of the experiments: each is one that ``coder-plugin compare`` takes."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest

from coder_plugin.cli.compare import Command, make_plans
from coder_plugin.compare.runs import Runs
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.training.prepare import make_objective
from tests.experiments.conftest import EXPERIMENTS


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_run_of_a_plan_is_one_that_its_program_takes(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_metric_learning")
    for plan in make_plans(Command(plan=str(path), trust_plan=True), {}):
        assert plan.seeds >= 3 and set(plan.peers) < {row.name for row in plan.rows}
        for row in plan.rows:
            assert len(row.points()) > 1, "a row chooses among some values"
            for point in row.points():
                words = Runs(tmp_path).command(point)
                if row.command is None:
                    make_objective(resolve_config(point.options))
                else:
                    assert Path(words[1]).parent == Path("scripts/experiments") and "{" not in shlex.join(words)
                    importlib.import_module(Path(words[1]).stem).build_parser().parse_args(words[2:])
