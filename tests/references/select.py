"""The choice of regions the slow way: suppression class after class by torchvision's ``nms``, all proposals looked at."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import nms

from coder_plugin.detectors.select import Choice


def select(scores: Tensor, boxes: Tensor, choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
    best = torch.full_like(scores, -1.0)
    for number in range(scores.shape[1]):
        kept = nms(boxes if boxes.ndim == 2 else boxes[:, number], scores[:, number], choice.nms)
        best[kept, number] = scores[kept, number]
    conf, classes = best.max(1)
    conf, order = conf.sort(descending=True, stable=True)
    wanted = conf >= choice.min_score
    wanted[: choice.min_regions] = True
    wanted &= conf >= 0
    wanted[choice.regions :] = False
    chosen = order[wanted]
    return chosen, classes[chosen], conf[wanted]
