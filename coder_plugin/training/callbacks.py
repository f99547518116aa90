"""What may run at set points of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Callback:
    """Base class: override the methods you need, and pass instances to ``Trainer(callbacks=[…])``.

    Every method is called on all ranks, in the order of the list. ``trainer`` is the :class:`~coder_plugin.Trainer`; setting
    ``trainer.stop`` to True on any rank ends the run, in one process after the current step, else one step later at most. An
    exception that a method raises ends the run.

    Example:
        >>> import tempfile
        >>> from coder_plugin import Trainer
        >>> class StopWhenGood(Callback):
        ...     def on_evaluation_end(self, trainer, results):
        ...         trainer.stop = results["rsum"] > 500
        >>> options = {"batch_size": 4, "train_num_samples": 8, "workers": 0, "logs": tempfile.mkdtemp()}
        >>> callback = StopWhenGood()
        >>> trainer = Trainer(model="coder-tiny", loss="dcl", train="scenes", config=options, callbacks=[callback])
        >>> callback.on_evaluation_end(trainer, {"rsum": 512.0})  # trainer.run() calls it after each evaluation
        >>> trainer.stop
        True
    """

    def on_step_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """After each training step. ``trainer.step`` already counts it; ``metrics`` are what ``training_step`` returned."""

    def on_evaluation_end(self, trainer: Any, results: Mapping[str, Any]) -> None:
        """After each evaluation. ``results`` holds ``epoch`` and ``step``, and what was measured, in percent: recall
        (``i2t_r1`` … ``rsum``), and with ``--zeroshot`` also ``zeroshot_top1`` and the like."""

    def on_save(self, trainer: Any, folder: Path) -> None:
        """After each checkpoint and its export. ``folder`` is the checkpoint's."""

    def on_train_end(self, trainer: Any, results: Mapping[str, Any]) -> None:
        """After the last epoch. ``results`` are what ``trainer.run()`` returns."""
