"""mAP@R, R-Precision and recall one query and one place at a time, as ECCV Caption's paper defines them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def ranked(scores: Sequence[float], right: set[int], own: int | None = None) -> list[int]:
    """Candidates, best first; of equal scores the wrong first, a wrong NaN above all and a right one below all."""

    def key(candidate: int) -> tuple[float, bool, int]:
        score, is_right = scores[candidate], candidate in right
        if math.isnan(score):
            score = -math.inf if is_right else math.inf
        return -score, is_right, candidate

    return sorted((c for c in range(len(scores)) if c != own), key=key)


def figures(matrix: Sequence[Sequence[float]], truth: dict[int, set[int]], *, own: bool = False) -> dict[str, float]:
    """Means over the queries that have a right candidate, in percent."""
    rows = []
    for query, right in truth.items():
        if not right:
            continue
        order = ranked(matrix[query], right, query if own else None)
        hits = [candidate in right for candidate in order]
        r = len(right)
        precisions = [sum(hits[: place + 1]) / (place + 1) if hits[place] else 0.0 for place in range(r)]
        rows.append([sum(precisions) / r, sum(hits[:r]) / r, *(float(any(hits[:k])) for k in (1, 5, 10))])
    means = [100 * sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return {**dict(zip(("map_at_r", "r_precision", "r1", "r5", "r10"), means, strict=True)), "queries": len(rows)}
