"""Train with Lightning: :class:`FollowCallback`, for the packages ``lightning`` and ``pytorch_lightning``."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

from coder_plugin.errors import CoderError, install_command
from coder_plugin.following import Following, clamp_logit_scale, find_model, follow

_BASES: dict[Any, None] = {}  # each package's trainer wants its own
for _package in ("lightning.pytorch", "pytorch_lightning"):
    with contextlib.suppress(ModuleNotFoundError):
        _BASES[import_module(_package).Callback] = None
if not _BASES:
    raise CoderError(f"Lightning is not installed: {install_command('lightning')}")
_Callback: Any = type("Callback", tuple(_BASES), {})

#: Strategies that hold only a part of the model in each process.
_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


class FollowCallback(_Callback):
    """Advances banks, momentum towers and centres once after every step that Lightning's ``Trainer`` performs, and keeps a
    trained ``logit_scale`` at most log(100).

    It follows all optimizers of the module, with automatic and manual optimization, from the beginning of ``fit`` to its end.

    Attributes:
        following: during ``fit``, what :func:`coder_plugin.follow` returned.

    Raises:
        CoderError: when ``fit`` begins: no model of :func:`coder_plugin.create_model` in the module, or several; a strategy
            that shards the model (FSDP, DeepSpeed); a callback that averages buffers.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[FollowCallback()], logger=False, accelerator="cpu", enable_progress_bar=False)
    """

    def __init__(self) -> None:
        self.following: Following | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = type(trainer.strategy).__name__
        if strategy in _SHARDED:
            raise CoderError(
                f"{strategy} holds a part of the model in each process; banks and momentum towers need all of it: take "
                "strategy='ddp'"
            )
        averaging = [type(each).__name__ for each in getattr(trainer, "callbacks", ()) if getattr(each, "_use_buffers", False)]
        if averaging:
            raise CoderError(f"{averaging[0]} would average the ids and counters of banks: give it use_buffers=False")
        self._stop()
        model = find_model(pl_module)
        self.following = follow(model, list(trainer.optimizers), after_step=lambda: clamp_logit_scale(model))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.following is not None:
            self.following.remove()
            self.following = None
