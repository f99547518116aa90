"""Whole runs of AsCL: learning, resuming, captions of every odd kind, what the log tells, what is refused."""

from __future__ import annotations

import itertools
import json
import logging

import numpy as np
import pytest

from coder_plugin.cli import main
from coder_plugin.data.regions.base import Record, Regions
from coder_plugin.training.loop import Trainer
from coder_plugin.training.plan import make_plan
from tests.training import region_data
from tests.training.test_region_training import (  # noqa: F401
    arguments,
    config,
    losses,
    made,
    result,
)

FUSED = "ascl(similarity=fusion,temperature=0.1) + ascl(temperature=0.1)"


@pytest.mark.slow
def test_the_fused_score_learns_and_its_evaluation_repeats(tmp_path, made):  # noqa: F811
    options = {"model": "region-bigru", "loss": FUSED, "epochs": 3, "val_frequency": 3, "captions": "all", "lr": 6e-3}
    found = Trainer.from_config(config(made, tmp_path, **options, wd=0.0, set=["fusion.heads=2"])).run()
    value = losses(tmp_path)
    assert sum(value[-5:]) < 0.8 * sum(value[:5]), (value[:5], value[-5:])
    last = found["last"]
    assert last["rsum"] > 300 and last["shortlist"]["rsum"] > 190 and last["rerank"] == 32
    run = str(tmp_path / "run")
    again = result(tmp_path, run, "--export", "last")
    assert again["rsum"] == pytest.approx(last["rsum"], abs=0.01)
    assert again["shortlist"]["rsum"] == pytest.approx(last["shortlist"]["rsum"], abs=0.01)
    # all is the whole matrix, and folds are re-ranked too
    every = result(tmp_path, run, "--export", "last", "--rerank", "all", "--folds", "2")
    assert every["rerank"] == "all" and every["folds"]["rsum"] >= every["rsum"] > 300


CAPTIONS = {
    "one caption per image": lambda number: (f"a red ball and a blue {region_data.WORDS[number]} in the house",),
    "captions of one word": lambda number: (region_data.WORDS[number], region_data.WORDS[(number + 1) % 12]),
    "one caption of one word": lambda number: (region_data.WORDS[number],),
    "captions longer than the context": lambda number: ("ball dog cat " * 20 + region_data.WORDS[number], "tree " * 40),
    "the same caption five times": lambda number: (f"two {region_data.WORDS[number]} on a tree",) * 5,
}
TOLD = {
    "one caption per image": "positive captions: truncate 24",
    "captions of one word": "positive captions: join 24",
    "one caption of one word": "positive captions: none 24",
    "captions longer than the context": "same tokens",
    "the same caption five times": "positive captions: truncate 24",
}


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        pytest.param(kind, model, marks=[pytest.mark.slow] * (kind != "one caption of one word"))
        for kind, model in zip(CAPTIONS, itertools.cycle(["region-bigru", "region-bert"]), strict=False)
    ],
)
def test_odd_captions_train_and_the_log_tells_which_positives_were_possible(tmp_path, made, capsys, kind, model):  # noqa: F811
    from coder_plugin.data.regions.precomp import PRECOMP

    rng = np.random.default_rng(0)
    records = [
        Record(f"image_{n}", Regions(rng.standard_normal((4, 12)).astype(np.float32), None, None), CAPTIONS[kind](n % 12))
        for n in range(24)
    ]
    folder = tmp_path / "data"
    for split in ("train", "dev"):
        PRECOMP.write(str(folder), iter(records), split=split)
    words = ["vocabulary=" + str(tmp_path / "words.json")] if model == "region-bigru" else []
    (tmp_path / "words.json").write_text(json.dumps(["<pad>", "<start>", "<end>", "<unk>", *region_data.WORDS]))
    options = config(
        made, tmp_path, model=model, loss=FUSED, train_data=str(folder), val_data=str(folder), epochs=1, val_frequency=1,
        word_dropout=0.0, negatives="mixture",
    )  # fmt: skip
    options["model_kwargs"] = [*options["model_kwargs"], *words]
    Trainer.from_config(options).run()
    assert len(losses(tmp_path)) == 3 and all(np.isfinite(losses(tmp_path)))
    assert TOLD[kind] in capsys.readouterr().out


def test_cosines_accumulate_and_fused_scores_refuse(tmp_path, made, capsys):  # noqa: F811
    Trainer.from_config(config(made, tmp_path, "cosine", loss="ascl", accum_freq=2, epochs=1)).run()
    assert np.isfinite(losses(tmp_path, "cosine")).all()
    command = [*arguments(made, tmp_path), "--loss", FUSED, "--accum-freq", "2"]
    assert main(command) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the head 'fusion' scores every pair of a batch inside the model" in error


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--loss", "dcl", "--negatives", "mixture"], '--negatives: no term of --loss "dcl" reads generated texts'),
        (["--loss", "ascl", "--negatives", "blur"], "known: dropout, feature_cutoff, gaussian, mixture"),
        (["--loss", "ascl", "--positives", "joined"], "known: join, truncate"),
        (["--loss", "ascl", "--negatives", "shuffle", "--set", "asymmetry.negatives=dropout"], "set the same option: give one"),
        (["--loss", "ascl", "--rerank", "8"], "this model has no fusion head"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, made, capsys, more, message):  # noqa: F811
    assert main([*arguments(made, tmp_path), *more]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("coder-plugin: error: ") and message in error, error


def test_a_feature_of_the_whole_image_is_read_where_the_data_have_it(tmp_path, made, capsys, caplog):  # noqa: F811
    from coder_plugin.data.regions.shards import write

    folder = tmp_path / "data"
    for split in ("train", "dev"):
        records = (
            record._replace(regions=Regions(record.regions.features, None, None, record.regions.features.mean(0)[:7]))
            for record in region_data.records(split)
        )
        write(str(folder), records, split=split)
    given = {"train_data": f"{folder}/train-*.tar", "val_data": f"{folder}/dev-*.tar", "epochs": 1, "val_frequency": 1}
    trainer = Trainer.from_config(config(made, tmp_path, "whole", loss=FUSED, **given))
    assert trainer.model.options.global_dim == 7
    assert make_plan(trainer)["notes"] == {}
    assert next(iter(trainer.loader.epoch(0)))["image"]["global"].shape == (8, 7)
    found = trainer.run()
    again = result(tmp_path, str(tmp_path / "whole"), "--export", "last")
    assert again["rsum"] == pytest.approx(found["last"]["rsum"], abs=0.01)
    without = Trainer.from_config(config(made, tmp_path, "none", loss="ascl", **given))
    assert without.model.options.global_dim == 0
    # a run that left it out is evaluated without it
    kwargs = [*config(made, tmp_path)["model_kwargs"], "global_dim=0"]
    capsys.readouterr()
    with caplog.at_level(logging.INFO):
        without = Trainer.from_config(config(made, tmp_path, "left out", loss=FUSED, **given, model_kwargs=kwargs))
        assert "V_g = V_g1 alone" in make_plan(without)["notes"]["fusion"][0]
        found = without.run()
    assert (capsys.readouterr().out + caplog.text).count("V_g = V_g1 alone") == 1
    assert found["last"]["rsum"] == pytest.approx(
        result(tmp_path, str(tmp_path / "left out"), "--export", "last")["rsum"], abs=0.01
    )


def test_the_plan_is_made_on_every_rank_and_printed_by_the_first(tmp_path, made, capsys, monkeypatch):  # noqa: F811
    """A fusion gathers in forward: a rank that stayed out would leave the others waiting."""
    trainer = Trainer.from_config(config(made, tmp_path, loss=FUSED))
    plans = []
    monkeypatch.setattr("coder_plugin.training.loop.make_plan", lambda trainer: plans.append(trainer) or {"objective": "shown"})
    monkeypatch.setattr("coder_plugin.training.loop.format_plan", str)
    monkeypatch.setattr("coder_plugin.training.loop.distributed.rank", lambda: 1)
    trainer.print_plan()
    assert plans == [trainer] and not capsys.readouterr().out
    monkeypatch.setattr("coder_plugin.training.loop.distributed.rank", lambda: 0)
    trainer.print_plan()
    assert plans == [trainer, trainer] and "shown" in capsys.readouterr().out
