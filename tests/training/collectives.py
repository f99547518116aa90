"""Counts the collectives that a training step makes itself, outside of DistributedDataParallel's own reducer."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from coder_plugin import Callback, Trainer, distributed

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor",
    "all_gather_single", "all_gather_object", "all_reduce", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
)  # fmt: skip


class Count(Callback):
    """The collectives of each step, each as its name and the lines of the package that called it."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.current: list[str] = []
        for name in COLLECTIVES:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            frames = [frame for frame in traceback.extract_stack() if "coder_plugin/" in frame.filename]
            places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[:-6:-1]]
            self.current.append(f"{name} < {' < '.join(places)}")
            return function(*args, **options)

        return counted

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        self.rank = distributed.rank()
        self.steps.append(self.current)
        self.current = []


def train(folder: Path, model: str, **more: Any) -> Trainer:
    """Six steps of 8 pairs, in the third and the last of which the pairs are clustered.

    Writes the collectives of the fourth and the fifth into ``folder/collectivesRANK.json``. Returns the trainer.
    """
    count = Count()
    config = {
        "batch_size": 4, "train_num_samples": 48, "epochs": 1, "workers": 0, "logs": str(folder), "name": "run", "warmup": 1,
        "val_frequency": 0, "report": False, "log_every_n_steps": 100, "model": model, **more,
    }  # fmt: skip
    config["set"] = ["momentum.bank_size=32", "prototypes.clusters=8", "prototypes.recluster=24"]
    trainer = Trainer(model=model, loss="coder", train="scenes", config=config, callbacks=[count])
    trainer.run()
    assert len(count.steps) == 6, len(count.steps)
    assert trainer.model.coder.heads["prototypes"].centres.ready
    (folder / f"collectives{count.rank}.json").write_text(json.dumps(count.steps[3:5]))
    return trainer
