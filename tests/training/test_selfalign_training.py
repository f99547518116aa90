"""Whole runs of SelfAlign: learning, the context block, resuming, frozen prototypes, word classes, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from coder_plugin.cli import main
from coder_plugin.training.loop import Trainer
from tests.training.test_region_training import (  # noqa: F401
    arguments,
    coder,
    config,
    losses,
    made,
    result,
)

ALONE = "lca + cra(ca_on=combined)"
FEW = ["alignment.prototypes=12"]


@pytest.mark.parametrize(
    ("model", "loss", "kwargs"),
    [
        pytest.param("region-bert-camera", ALONE, [], marks=pytest.mark.slow),
        pytest.param("region-bert", f"dcl + {ALONE}", [], marks=pytest.mark.slow),
        pytest.param("region-bigru-vsrn", "dcl + lca + cra", ["word_projection=true"], marks=pytest.mark.slow),
    ],
)
def test_a_run_learns_and_its_evaluation_repeats_with_and_without_contexts(tmp_path, made, model, loss, kwargs):  # noqa: F811
    options = {"model": model, "loss": loss, "epochs": 3, "val_frequency": 3, "captions": "all", "wd": 0.0, "lr": 5e-3}
    given = config(made, tmp_path, **options, set=FEW)
    found = Trainer.from_config({**given, "model_kwargs": [*given["model_kwargs"], *kwargs]}).run()["last"]
    value = losses(tmp_path)
    assert sum(value[-5:]) < 0.95 * sum(value[:5]), (value[:5], value[-5:])
    assert found["rsum"] > 250, found  # chance is some 125
    run = [str(tmp_path / "run"), "--export", "last"]
    assert result(tmp_path, *run)["rsum"] == pytest.approx(found["rsum"], abs=0.01)
    base, whole = result(tmp_path, *run, "--context-weight", "0", "1")
    assert [row["name"].split(", ")[-1] for row in (base, whole)] == ["context weight 0", "context weight 1"]
    assert whole["rsum"] == pytest.approx(found["rsum"], abs=0.01) and base["rsum"] != whole["rsum"]


def test_coder_and_selfalign_score_together_and_each_part_can_be_weighed(tmp_path, made):  # noqa: F811
    options = coder(made)
    options["set"] = [*options["set"], *FEW]
    Trainer.from_config(config(made, tmp_path, **{**options, "loss": "lca + cra + coder"}, epochs=1)).run()
    run = [str(tmp_path / "run"), "--export", "last"]
    rows = result(tmp_path, *run, "--beta", "1", "0.9", "--context-weight", "0", "1")
    assert [row["name"].partition(", ")[2] for row in rows] == [
        f"beta {beta}, context weight {weight}" for beta in ("1", "0.9") for weight in (0, 1)
    ]
    assert rows[3]["rsum"] == pytest.approx(result(tmp_path, *run)["rsum"], abs=0.01)
    assert np.isfinite(losses(tmp_path)).all()


def test_prototypes_frozen_for_the_first_epoch(tmp_path, made):  # noqa: F811
    trainer = Trainer.from_config(config(made, tmp_path, loss=ALONE, wd=0.0, set=[*FEW, "alignment.freeze_steps=epoch"]))
    assert trainer.model.coder.heads["alignment"].freeze_steps == trainer.steps_per_epoch > 1
    seen = []
    alignment = trainer.model.coder.heads["alignment"]
    alignment.prototypes.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))
    trainer.run()
    first, second = seen[: trainer.steps_per_epoch], seen[trainer.steps_per_epoch :]
    assert max(first) == 0 < min(second)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--loss", "cra(ca_on=both)"], "ca_on=both must be context or combined"),
        (["--loss", "dcl + cra(ca_on=none)", "--set", "contexts.branches=none"], "leaves nothing to learn"),
        (["--loss", "dcl + lca", "--context-blocks", "2"], "context_blocks"),
        (["--loss", "dcl + lca", "--set", "alignment.words=noun", "--tagger", "no_such_pipeline"], "no_such_pipeline"),
    ],
)
def test_mistakes_are_one_line(tmp_path, made, capsys, more, message):  # noqa: F811
    assert main([*arguments(made, tmp_path), *more]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
