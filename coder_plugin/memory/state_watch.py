"""Notice training loops that never advance the heads' state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

#: Training forwards, each after another optimizer step, before the warning.
_FORWARDS = 3


class StateWatch:
    """Warns once if a model trains and its banks, momentum towers and centres stand still.

    An optimizer step is noticed by the version of a trained parameter, which every in-place change raises. So
    micro-batches that accumulate gradients and steps that a loss scaler skips do not count.
    """

    def __init__(self) -> None:
        self._version: tuple[int, int] | None = None
        self._forwards = self._writes = 0
        self._warned = False

    def at_forward(self, model: Any) -> None:
        """A forward pass in training mode begins."""
        followed_by = model.coder.followed_by
        if self._warned or hasattr(model, "unshard"):  # FSDP2 writes the parameters in every forward pass
            return
        if followed_by is not None and followed_by.stepping:  # L-BFGS changes parameters between the calls of its closure
            return
        parameter = next((each for each in model.parameters() if each.requires_grad), None)
        if not isinstance(parameter, nn.Parameter):  # none is trained, or functional_call has replaced them
            return
        version = (id(parameter), parameter._version)
        if version != self._version:
            self._version, self._forwards = version, self._forwards + 1
        if self._forwards >= _FORWARDS:
            self._warned = True
            if followed_by is not None:
                logging.warning(
                    "the model's banks, momentum towers or centres have not moved for %d training steps: another optimizer "
                    "than the one that coder_plugin.follow was given steps the model: give it the one whose step() is called",
                    self._forwards - 1,
                )
                return
            logging.warning(
                "the model's banks, momentum towers or centres have not moved for %d training steps: call "
                "coder_plugin.follow(model, optimizer) once before training (with Lightning or Hugging Face's Trainer "
                "add the callback FollowCallback of coder_plugin.integrations instead), or model.coder.post_step() "
                "after every optimizer.step()",
                self._forwards - 1,
            )

    def advanced(self) -> None:
        """The state was written, or deliberately not."""
        self._version, self._forwards = None, 0

    def writing(self, heads: Mapping[str, Any]) -> None:
        """The stashes of ``heads``, by name, are written now: warn once of a head that was never handed anything."""
        self._writes += 1
        if self._writes == _FORWARDS and (unfed := [name for name, head in heads.items() if head.unfed]):
            logging.warning(
                "in %d steps the loss has handed no values to head %s, so its state does not change: train with the loss that "
                "the model was made for, from create_loss(..., model=model); a copy of the model needs a loss of its own",
                self._writes, " or ".join(map(repr, unfed)),
            )  # fmt: skip
