"""Which steps ``metrics.jsonl`` has rows of: every n-th and each epoch's last, also in a resumed run; and a run's seconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coder_plugin import Callback, Trainer
from coder_plugin.data.item import Item
from coder_plugin.errors import CoderError
from coder_plugin.files import sha256_json
from coder_plugin.training import checkpoint
from tests.reliability.tiny_run import items, options, rows, trainer


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder) if "loss" in row]


class StopAt(Callback):
    """End the run after some step, as a signal does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        trainer.stop = trainer.step == self.step


@pytest.mark.parametrize(("every", "expected"), [(20, [0, 3, 7]), (3, [0, 3, 6, 7]), (1, list(range(8)))])
def test_an_epochs_last_step_has_a_row(tmp_path: Path, every: int, expected: list[int], capsys: Any) -> None:
    trainer(options(tmp_path, log_every_n_steps=every)).run()
    printed = capsys.readouterr().out
    assert "dcl_loss" in printed and "share/" not in printed  # the log has more than the line
    assert steps(tmp_path / "run") == expected
    for row in rows(tmp_path / "run"):
        if "loss" in row:
            assert row["share/dcl_loss"] + row["share/m_dcl_loss"] == pytest.approx(1)  # measured at these steps, too
            assert {"lr", "gradient_norm", "image_rank", "coder/momentum/filled"} <= row.keys()


def test_an_epoch_of_several_micro_batches_and_a_rest(tmp_path: Path) -> None:
    trainer(options(tmp_path, log_every_n_steps=20, accum_freq=2, batch_size=2), count=19).run()
    assert steps(tmp_path / "run") == [0, 3, 7]  # of nine micro-batches the last is left out


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


@pytest.mark.parametrize("stopped", range(1, 8))
def test_a_resumed_run_has_the_same_rows(tmp_path: Path, whole: list[dict[str, Any]], stopped: int) -> None:
    made = trainer(options(tmp_path, name="other", log_every_n_steps=3, save_every_steps=0, val_frequency=2))
    made.callbacks.append(StopAt(stopped))
    made.run()
    trainer(options(tmp_path, name="other", log_every_n_steps=3, save_every_steps=0, resume="latest")).run()
    assert whole == [row for row in rows(tmp_path / "other") if "loss" in row] and steps(tmp_path / "other") == [0, 3, 6, 7]


def test_a_checkpoint_has_the_seconds_of_training(tmp_path: Path) -> None:
    made = trainer(options(tmp_path, epochs=1))
    made.run()
    path = checkpoint.newest(tmp_path / "run" / "checkpoints")
    first = json.loads((path / "manifest.json").read_text())["seconds"]
    assert 0 < first == made.seconds < 60

    def changed(name: str, **fields: Any) -> dict[str, Any]:
        folder = shutil.copytree(path, tmp_path / name / "checkpoints" / path.name)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest.update(fields)
        manifest = {key: value for key, value in manifest.items() if key != "manifest_sha256" and value != "absent"}
        (folder / "manifest.json").write_text(json.dumps({**manifest, "manifest_sha256": sha256_json(manifest)}))
        return options(tmp_path, name=name, resume="latest")

    later = trainer(changed("later", seconds=1000.0))
    later.run()
    assert 1000 < later.seconds < 1060 and later.step == 8
    older = trainer(changed("older", seconds="absent"))  # unknown, rather than those since the checkpoint
    older.run()
    assert older.seconds is None
    for value in (-1.0, "long", float("inf")):
        with pytest.raises(CoderError, match="no checkpoint in .* is whole|seconds"):
            trainer(changed(f"wrong {value}", seconds=value)).run()
