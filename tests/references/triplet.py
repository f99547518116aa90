"""The hinge loss the slow way: VSE++'s objective, every anchor against every negative in a loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def triplet(
    similarity: Sequence[Sequence[float]],
    ids: Sequence[Any] | None = None,
    *,
    margin: float = 0.2,
    hardest: bool = True,
    reduction: str = "mean",
) -> float:
    """Images x texts; the two directions are added. Anchors without negatives count as zero, also in a mean."""
    n = len(similarity)
    names = list(range(n)) if ids is None else list(ids)
    loss = 0.0
    for score in (lambda a, c: similarity[a][c], lambda a, c: similarity[c][a]):
        anchors = []
        for anchor in range(n):
            hinges = [
                max(0.0, margin - score(anchor, anchor) + score(anchor, other))
                for other in range(n)
                if other != anchor and names[other] != names[anchor]
            ]
            if not hinges:
                anchors.append(0.0)
            elif hardest:
                anchors.append(max(hinges))
            elif reduction == "sum":
                anchors.append(math.fsum(hinges))
            else:
                anchors.append(math.fsum(hinges) / len(hinges))
        loss += math.fsum(anchors) / (n if reduction == "mean" else 1)
    return loss
