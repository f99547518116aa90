"""How many collectives a training step makes, and what travels in them, on two gloo processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from coder_plugin import Callback, Trainer, distributed
from coder_plugin.training import checkpoint
from coder_plugin.training.plan import make_plan
from tests.reliability import ranks as forked
from tests.training import collectives


def test_collectives_of_a_step(tmp_path, tiny_model) -> None:
    """Of a large batch each of dcl, m_dcl and concept_dcl gathers its largest weights once, and those over the banks once."""

    def train(folder: Path) -> None:
        (folder / "large").mkdir(exist_ok=True)
        trainer = collectives.train(folder, tiny_model)
        assert distributed.world_size() == 2 and trainer.objective.local_loss
        assert all(term.local_loss for term in trainer.loss.terms.values())  # each rank computes its own anchors
        assert make_plan(trainer)["options"]["local_loss"] is True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("coder_plugin.contrast.pairs.SMALL_MATRIX", 0)
            collectives.train(folder / "large", tiny_model)

    endings = forked.run(train, tmp_path)
    assert [ending.status for ending in endings] == [0, 0], endings
    for folder, expected in ((tmp_path, 4), (tmp_path / "large", 9)):
        one, two = (json.loads((folder / f"collectives{rank}.json").read_text()) for rank in (0, 1))
        assert one == two
        for step in one:
            assert len(step) == expected, "\n".join(step)


@pytest.mark.slow
def test_statistics_of_momentum_towers_travel_with_the_gradients(tmp_path, tiny_model) -> None:
    """No collective more for a model with BatchNorm, whose momentum towers have the first rank's statistics on all ranks."""
    config = json.loads(Path(tiny_model).read_text())
    config["vision_cfg"] = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    path = tmp_path / "tiny-resnet.json"
    path.write_text(json.dumps(config))

    def train(folder: Path) -> None:
        trainer = collectives.train(folder, str(path))
        towers = trainer.model.coder.heads["momentum"].towers
        own, online = towers.statistics(towers.model), towers.statistics(trainer.model)
        both = distributed.gather(torch.stack([own, online]))
        assert len(own) > 100 and torch.equal(both[0], both[2]) and torch.equal(both[0], both[1])
        assert not torch.equal(both[1], both[3]), "each rank has seen pictures of its own"

    endings = forked.run(train, tmp_path)
    assert [ending.status for ending in endings] == [0, 0], endings
    for step in json.loads((tmp_path / "collectives0.json").read_text()):
        assert len(step) == 4, "\n".join(step)


class Stop(Callback):
    """Rank 1 sets ``stop`` after the second step."""

    def on_step_end(self, trainer, metrics) -> None:
        if trainer.step == 2 and distributed.rank() == 1:
            trainer.stop = True


class Interrupt(Callback):
    """Rank 1 receives a signal while it takes the third step."""

    def on_step_end(self, trainer, metrics) -> None:
        if trainer.step == 2 and distributed.rank() == 1:
            take = trainer.training_step

            def interrupted(batches):
                os.kill(os.getpid(), signal.SIGTERM)
                return take(batches)

            trainer.training_step = interrupted


#: 2: the epoch ends with the step of the stop.
@pytest.mark.parametrize("steps", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stop_on_one_rank_ends_all_after_one_more_step_and_a_signal_at_once(tmp_path, tiny_model, steps) -> None:
    config = {
        "batch_size": 4, "train_num_samples": 48 if steps == 3 else 16, "epochs": 2, "workers": 0, "logs": str(tmp_path),
        "val_frequency": 0, "report": False, "model": tiny_model,
    }  # fmt: skip

    def make(name: str, callback: Callback) -> Trainer:
        return Trainer(model=tiny_model, loss="dcl", train="scenes", config={**config, "name": name}, callbacks=[callback])

    def train(_) -> None:
        trainer = make("stopped", Stop())
        trainer.run()
        assert (trainer.step, trainer.epoch) == (steps, 0 if steps == 3 else 1) and trainer.stop
        make("interrupted", Interrupt()).run()

    endings = forked.run(train, tmp_path, timeout=60)
    assert [ending.status for ending in endings] == [75, 75], endings
    assert "stopped after step 3" in endings[0].output, endings[0].output
    newest = checkpoint.newest(tmp_path / "stopped" / "checkpoints")
    assert newest is not None and newest.name == f"step_{steps:08d}"


@pytest.mark.slow
def test_a_stop_on_one_rank_between_epochs_ends_both(tmp_path, tiny_model) -> None:
    class StopAtSave(Callback):
        def on_save(self, trainer, folder) -> None:
            trainer.stop = distributed.rank() == 1

    config = {
        "batch_size": 4, "train_num_samples": 16, "epochs": 2, "workers": 0, "logs": str(tmp_path), "name": "run",
        "val_frequency": 0, "report": False, "model": tiny_model,
    }  # fmt: skip

    def train(_) -> None:
        trainer = Trainer(model=tiny_model, loss="dcl", train="scenes", config=config, callbacks=[StopAtSave()])
        trainer.run()
        assert (trainer.step, trainer.epoch) == (2, 1)

    endings = forked.run(train, tmp_path, timeout=60)
    assert [ending.status for ending in endings] == [0, 0], endings
