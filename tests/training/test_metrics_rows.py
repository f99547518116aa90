"""Which steps ``metrics.jsonl`` has rows of: every n-th and each epoch's last, also in a resumed run; and a run's seconds."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from coder_plugin import Callback, Trainer
from coder_plugin.cli.train import summary
from coder_plugin.data.item import Item
from tests.reliability.tiny_run import items, options, rows, trainer

RECALL = {f"{direction}_{name}": 1.0 for direction in ("i2t", "t2i") for name in ("r1", "r5", "r10", "medr", "meanr")}
RECALL |= {"images": 8, "texts": 8}


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder) if "loss" in row]


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder) if "loss" in row]


class StopAt(Callback):
    """End the run after some step, as a signal does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        trainer.stop = trainer.step == self.step


@pytest.mark.parametrize(("every", "expected"), [pytest.param(20, [0, 3, 7], marks=pytest.mark.slow), (3, [0, 3, 6, 7])])
def test_an_epochs_last_step_has_a_row(tmp_path: Path, every: int, expected: list[int], capsys: Any) -> None:
    trainer(options(tmp_path, log_every_n_steps=every)).run()
    printed = capsys.readouterr().out
    assert "dcl_loss" in printed and "share/" not in printed  # the log has more than the line
    assert steps(tmp_path / "run") == expected
    for row in rows(tmp_path / "run"):
        if "loss" in row:
            assert row["share/dcl_loss"] + row["share/m_dcl_loss"] == pytest.approx(1)  # measured at these steps, too
            assert {"lr", "gradient_norm", "image_rank", "coder/momentum/filled"} <= row.keys()


def test_the_logged_rate_is_the_one_of_the_step(tmp_path: Path) -> None:
    config = options(tmp_path, log_every_n_steps=1, warmup=0, lr=5e-4, lr_scheduler="cosine", epochs=2, report=False)
    trainer(config).run()
    rates = {row["step"]: row["lr"] for row in rows(tmp_path / "run") if "lr" in row}
    assert rates == pytest.approx({step: 2.5e-4 * (1 + math.cos(math.pi * step / 8)) for step in range(8)})


@pytest.mark.parametrize(
    ("most", "evaluated"), [(5, ["epoch 1", "step 5"]), pytest.param(8, ["epoch 1", "epoch 2"], marks=pytest.mark.slow)]
)
def test_a_run_of_so_many_steps_is_resumed_to_more(tmp_path: Path, most: int, evaluated: list[str], capsys: Any) -> None:
    """It ends within an epoch, its schedule with it; resumed, it goes on with the next step."""
    config = options(tmp_path, log_every_n_steps=1, save_every_steps=0, report=False, lr_scheduler="const", warmup=0)
    config.pop("epochs")
    short = trainer({**config, "max_steps": most})
    short.run()
    assert short.step == most and steps(tmp_path / "run") == list(range(most)) and short.config.optim.epochs == 2
    printed = capsys.readouterr().out
    assert re.findall(r"after (.+?):", printed) == evaluated and f"step {4 - -most % 4}/4" in printed
    assert printed.split("waiting for data, ")[-1].startswith("0:00 left")
    trainer({**config, "max_steps": 9, "resume": "latest"}).run()
    whole = trainer({**config, "max_steps": 9, "name": "whole"})
    whole.run()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and whole.config.optim.epochs == 3
    both = trainer({**config, "max_steps": 9, "epochs": 1, "name": "both"})
    assert both.total_steps == 4 and both.config.optim.epochs == 1


def test_training_that_makes_a_model_worse_is_reported(tmp_path: Path, caplog: Any) -> None:
    made = trainer(options(tmp_path, epochs=1, val_before=True, report=False))
    measured = iter([{"rsum": 52.4}, {"rsum": 25.6}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coder_plugin.training.loop.evaluate", lambda *_, **__: {**RECALL, **next(measured)})
        results = made.run()
    assert results["before"]["rsum"] == 52.4 and results["best"]["rsum"] == 25.6
    assert "the best evaluation has R@sum 25.6, the model before training 52.4: training made it worse" in caplog.text
    table = summary(made, results)
    lines = [line.split() for line in table.splitlines() if " 52.4 " in line or " 25.6 " in line]
    assert [words[0] for words in lines] == ["before", "last", "best"]
    again = trainer(options(tmp_path, epochs=2, report=False, resume="latest", val_frequency=0))
    again.run()
    assert again.before["rsum"] == 52.4


def test_only_trained_weights_are_evaluated_before_the_first_step(tmp_path: Path, monkeypatch: Any) -> None:
    """Of random ones it is chance, unless it is asked for."""
    monkeypatch.setattr("coder_plugin.training.loop.evaluate", lambda *_, **__: {**RECALL, "rsum": 30.0})
    few = {"epochs": 1, "report": False}
    assert trainer(options(tmp_path, **few)).run()["before"] == {}
    tuned = trainer(options(tmp_path, name="tuned", pretrained=str(tmp_path / "run/export/last"), **few))
    assert tuned.run()["before"]["rsum"] == 30.0


def test_an_epoch_that_bad_samples_shorten(tmp_path: Path) -> None:
    def load() -> None:
        raise ValueError("damaged")

    config = options(tmp_path, log_every_n_steps=20, max_bad_samples=0.9, epochs=1, report=False)
    train = [Item(item.key, item.captions, load) if 5 <= number < 11 else item for number, item in enumerate(items(16))]
    made = Trainer(model=config.pop("model"), loss="dcl + m_dcl", train=train, config=config)
    made.run()
    assert made.step == 2 and steps(tmp_path / "run") == [0, 1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of steps of a run that is not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trainer(options(folder, log_every_n_steps=3, save_every_steps=0, report=False)).run()
    return [row for row in rows(folder / "run") if "loss" in row]


@pytest.mark.parametrize("stopped", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_rows(tmp_path: Path, whole: list[dict[str, Any]], stopped: int) -> None:
    made = trainer(options(tmp_path, name="other", log_every_n_steps=3, save_every_steps=0, val_frequency=2))
    made.callbacks.append(StopAt(stopped))
    made.run()
    trainer(options(tmp_path, name="other", log_every_n_steps=3, save_every_steps=0, resume="latest")).run()
    assert whole == [row for row in rows(tmp_path / "other") if "loss" in row] and steps(tmp_path / "other") == [0, 3, 6, 7]
