"""The plan files of the experiments: each is one that ``coder-plugin compare`` takes."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest

from coder_plugin import create_loss, create_model
from coder_plugin.backbones.tokenizers import build_vocabulary
from coder_plugin.cli.compare import Command, make_plans
from coder_plugin.compare.runs import Runs
from coder_plugin.config import TrainConfig
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.training.prepare import make_objective
from tests.backbones import tiny_bert
from tests.experiments.conftest import EXPERIMENTS


def _make_small(config: TrainConfig, objective: Objective, text: str) -> None:
    """The row's loss on a small model of its kind: :class:`CoderError` if it does not take that model's features."""
    name = config.model.name if config.model.name.startswith("region-") else "coder-tiny"
    sizes = {"text": text} if "bert" in name else {"vocabulary": build_vocabulary(["dog"], least=1), "word_dim": 4}
    sizes = {"embed_dim": 16, "heads": 4, "region_dim": 8, **sizes} if name != "coder-tiny" else {}
    if "progress" in required_heads(objective):
        objective = objective.with_options({"progress.steps_per_epoch": 1})
    create_loss(objective, model=create_model(name, loss=objective, **sizes))


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_run_of_a_plan_is_one_that_its_program_takes(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_metric_learning")
    text = tiny_bert.make(tmp_path)
    for plan in make_plans(Command(plan=str(path), trust_plan=True), {}):
        assert plan.seeds >= 3 and set(plan.peers) < {row.name for row in plan.rows}
        for row in plan.rows:
            assert len(row.points()) > 1, "a row chooses among some values"
            for number, point in enumerate(row.points()):
                words = Runs(tmp_path).command(point)
                if row.command is None:
                    config = resolve_config(point.options)
                    objective = make_objective(config)
                    if number == 0:
                        _make_small(config, objective, text)
                else:
                    assert Path(words[1]).parent == Path("scripts/experiments") and "{" not in shlex.join(words)
                    importlib.import_module(Path(words[1]).stem).build_parser().parse_args(words[2:])
