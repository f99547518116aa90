"""Measure what a run costs by a few of its steps: ``python -m coder_plugin.compare.probe OPTIONS.json OUTPUT.json``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin.training.callbacks import Callback

#: Steps that are taken; the first ones, which also compile and fill caches, do not count.
STEPS, _FIRST = 8, 2


class Clock(Callback):
    """The times of what a run does."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.evaluated: list[float] = []
        self.saved = 0.0

    def on_step_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.steps.append(time.monotonic())

    def on_evaluation_end(self, trainer: Any, results: Mapping[str, Any]) -> None:
        self.evaluated.append(time.monotonic())

    def on_save(self, trainer: Any, folder: Path) -> None:
        self.saved = time.monotonic()


def measure(options: Mapping[str, Any], *, begun: float) -> dict[str, float]:
    """Train a few steps.

    Args:
        options: of the run, by flat name, with a folder for it.
        begun: when the process began, by ``time.monotonic``.

    Returns:
        ``seconds`` that the whole run would take, its ``steps``, ``step``: seconds of one, and ``disk``: bytes of its folder.
    """
    from coder_plugin.pretrained.options import resolve_config
    from coder_plugin.training.loop import Trainer

    planned = Trainer.from_config(resolve_config({**options, "resume": None}))
    steps, epochs = planned.total_steps, planned.config.optim.epochs
    del planned
    second = time.monotonic()  # a trainer is made twice here, and once in a run
    clock = Clock()
    config = resolve_config({**options, "max_steps": min(STEPS, steps), "log_every_n_steps": 1000})
    trainer = Trainer.from_config(config, callbacks=[clock])
    made = time.monotonic()
    trainer.run()
    first = min(_FIRST, len(clock.steps) - 1)
    counted = clock.steps[first:]
    step = (counted[-1] - counted[0]) / (len(counted) - 1) if len(counted) > 1 else clock.steps[-1] - made
    evaluation = clock.evaluated[-1] - clock.steps[-1]
    save = clock.saved - clock.evaluated[-1]
    start = clock.steps[first] - made - evaluation * (len(clock.evaluated) > 1) - step * first + (made - second)
    start += max(0.0, (second - begun) - (made - second))
    disk = sum(path.stat().st_size for path in trainer.folder.rglob("*") if path.is_file())
    return {"seconds": start + steps * step + epochs * (evaluation + save), "steps": steps, "step": step, "disk": disk}


def main() -> None:
    begun = time.monotonic()
    content = measure(json.loads(Path(sys.argv[1]).read_text()), begun=begun)
    Path(sys.argv[2]).write_text(json.dumps(content))


if __name__ == "__main__":
    main()
