"""Measure what a run costs by a few of its steps: ``python -m coder_plugin.compare.probe OPTIONS.json OUTPUT.json BEGUN``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin.training.callbacks import Callback

#: Steps that are taken; the first ones, which also start workers and fill caches, count once.
STEPS, _FIRST = 8, 2
#: A run of fewer steps is warned of.
_FEW = 30


class Clock(Callback):
    """The times of what a run does; ends it after :data:`STEPS` steps."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.evaluated: list[float] = []
        self.saved = 0.0

    def on_step_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.steps.append(time.time())
        trainer.stop = len(self.steps) >= STEPS

    def on_evaluation_end(self, trainer: Any, results: Mapping[str, Any]) -> None:
        self.evaluated.append(time.time())

    def on_save(self, trainer: Any, folder: Path) -> None:
        self.saved = time.time()


def measure(options: Mapping[str, Any], begun: float) -> dict[str, Any]:
    """Train a few steps.

    Args:
        options: of the run, by flat name, with a folder for it.
        begun: when the process was started, by ``time.time``.

    Returns:
        ``seconds`` that the whole run would take, those of one ``step`` and of one ``evaluation``, the folder's bytes on
        ``disk``, the run's number of ``steps``, and ``warnings`` of a set-up that trains badly.
    """
    from coder_plugin.pretrained.options import resolve_config
    from coder_plugin.training.fine_tuning import advice
    from coder_plugin.training.loop import Trainer

    clock = Clock()
    trainer = Trainer.from_config(resolve_config(options), callbacks=[clock])
    trainer.run()
    evaluation, save = clock.evaluated[-1] - clock.steps[-1], clock.saved - clock.evaluated[-1]

    def training(start: float, end: float) -> float:
        """Seconds between two steps without the evaluations and checkpoints of epochs that end there."""
        return end - start - (evaluation + save) * sum(start < moment < end for moment in clock.evaluated)

    first = min(_FIRST, max(0, len(clock.steps) - 2))
    counted = clock.steps[first:]
    if len(counted) > 1:
        step = training(counted[0], counted[-1]) / (len(counted) - 1)
    else:  # one step: with the start, or from an evaluation before it
        step = clock.steps[0] - max(moment for moment in (begun, *clock.evaluated) if moment < clock.steps[0])
    step = max(step, 0.0)
    before = clock.steps[0] - begun + training(clock.steps[0], clock.steps[first]) - (first + 1) * step
    seconds = before + trainer.total_steps * step + trainer.config.optim.epochs * (evaluation + save)
    disk = sum(path.stat().st_size for path in trainer.folder.rglob("*") if path.is_file())
    warnings = [f"{each.text}: {each.do}" for each in advice(trainer.config, trainer.model, trainer.loss)]
    if trainer.total_steps < _FEW:
        few = f"a run has {trainer.total_steps} steps, too few to learn"
        warnings.append(f"{few}: give more --epochs or a smaller --batch-size")
    return {
        "seconds": seconds, "steps": trainer.total_steps, "step": step, "evaluation": evaluation, "disk": disk,
        "warnings": warnings,
    }  # fmt: skip


if __name__ == "__main__":
    content = measure(json.loads(Path(sys.argv[1]).read_text()), float(sys.argv[3]))
    Path(sys.argv[2]).write_text(json.dumps(content))
