"""How many collectives a training step makes, and what travels in them, on two gloo processes."""

from __future__ import annotations

import json
import os
import signal

import pytest

from coder_plugin import Callback, Trainer, distributed
from tests.reliability import ranks as forked
from tests.training import collectives


@pytest.mark.parametrize(("loss", "number"), [("coder", 4), ("dcl + clip", 2)])
def test_collectives_of_a_step(tmp_path, tiny_model, loss, number) -> None:
    endings = forked.run(lambda folder: collectives.train(folder, tiny_model, loss), tmp_path)
    assert [ending.status for ending in endings] == [0, 0], endings
    one, two = (json.loads((tmp_path / f"collectives{rank}.json").read_text()) for rank in (0, 1))
    assert one == two
    for step in one:
        print("\n".join(step))
        assert len(step) == number, "\n".join(step)


class Interrupt(Callback):
    """Rank 1 receives a signal while it takes the third step."""

    def on_step_end(self, trainer, metrics) -> None:
        if trainer.step == 2 and distributed.rank() == 1:
            take = trainer.training_step

            def interrupted(batches):
                os.kill(os.getpid(), signal.SIGTERM)
                return take(batches)

            trainer.training_step = interrupted


def test_a_signal_to_one_rank_travels_with_the_losses(tmp_path, tiny_model) -> None:
    config = {
        "batch_size": 4, "train_num_samples": 48, "epochs": 1, "workers": 0, "logs": str(tmp_path), "name": "run",
        "val_frequency": 0, "report": False, "model": tiny_model,
    }  # fmt: skip
    endings = forked.run(
        lambda _: Trainer(model=tiny_model, loss="dcl", train="scenes", config=config, callbacks=[Interrupt()]).run(), tmp_path
    )
    assert [ending.status for ending in endings] == [75, 75], endings
    assert "stopped after step 3" in endings[0].output, endings[0].output
