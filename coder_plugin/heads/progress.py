"""The number of epochs that are done, for terms that change from one epoch to the next (docs/equations.md#score)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coder_plugin.heads.base import BackboneInfo, TrainingFacts
from coder_plugin.heads.capabilities import KeepsState


class Progress(KeepsState):
    """Counts performed optimizer steps, and the epochs that they make.

    Requires ``image_features`` [B, D]. Provides ``coder_epoch`` int64 [B], the number of epochs done, the same in each row:
    0 in the first epoch.

    Args:
        steps_per_epoch: optimizer steps of an epoch, >= 1; a trainer derives it from the data. It may change when a run is
            resumed, as with another number of ranks: epochs that are done stay done.

    Raises:
        ValueError: ``steps_per_epoch`` below 1, or not given.

    Example:
        >>> head = Progress(BackboneInfo(embed_dim=1), steps_per_epoch=2)
        >>> for step in range(3):
        ...     print(head(image_features=torch.ones(4, 1))["coder_epoch"].tolist())
        ...     head.post_step()
        [0, 0, 0, 0]
        [0, 0, 0, 0]
        [1, 1, 1, 1]
    """

    requires = ("image_features",)
    provides = ("coder_epoch",)
    data_options = ("steps_per_epoch",)
    free_on_resume = ("steps_per_epoch",)  # it depends on the number of ranks

    epoch: Tensor
    steps: Tensor

    def __init__(self, backbone: BackboneInfo, *, steps_per_epoch: int | None = None) -> None:
        super().__init__()
        if steps_per_epoch is None:
            raise ValueError(
                "steps_per_epoch must be given: a trainer derives the number of optimizer steps of an epoch from the data; "
                "elsewhere set it, such as with the option progress.steps_per_epoch=200"
            )
        if steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be >= 1, got {steps_per_epoch}")
        self.steps_per_epoch = steps_per_epoch
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # of the epoch that is not done

    @classmethod
    def options_from_data(cls, options: Mapping[str, Any], facts: TrainingFacts) -> dict[str, Any]:
        """The steps of an epoch; 1 where no step is planned, as in an evaluation."""
        if "steps_per_epoch" in options:
            return {}
        return {"steps_per_epoch": max(1, facts.samples_per_epoch // (facts.pairs_per_step or facts.samples_per_epoch or 1))}

    def forward(self, image_features: Tensor) -> dict[str, Tensor]:
        return {"coder_epoch": self.epoch.expand(len(image_features))}

    def post_step(self) -> None:
        self.steps += 1
        done = self.steps >= self.steps_per_epoch
        self.epoch += done
        self.steps *= ~done
        super().post_step()
