"""Retrieval ranks the slow way, one pair at a time, in plain Python floats (docs/equations.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


def _as_right(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _as_wrong(score: float) -> float:
    return math.inf if math.isnan(score) else score


def _rank(right: float, wrong: Sequence[float], *, hopeless: bool) -> int:
    """Wrong candidates that are not strictly below the right one; all of them where the right score is NaN."""
    return len(wrong) if hopeless else sum(_as_wrong(score) >= right for score in wrong)


def ranks(similarity: Sequence[Sequence[float]], image_of_text: Sequence[int]) -> tuple[list[int], list[int]]:
    """0-based ranks (images, texts) of a score matrix given as rows of images."""
    images, texts = range(len(similarity)), range(len(image_of_text))
    i2t = []
    for i in images:
        wrong = [similarity[i][t] for t in texts if image_of_text[t] != i]
        own = [similarity[i][t] for t in texts if image_of_text[t] == i]
        i2t.append(min(_rank(_as_right(s), wrong, hopeless=math.isnan(s)) for s in own))
    t2i = []
    for t in texts:
        right = similarity[image_of_text[t]][t]
        wrong = [similarity[i][t] for i in images if i != image_of_text[t]]
        t2i.append(_rank(_as_right(right), wrong, hopeless=math.isnan(right)))
    return i2t, t2i


def recall(similarity: Sequence[Sequence[float]], image_of_text: Sequence[int]) -> dict[str, float]:
    """Percentages and 1-based median and mean ranks, under the names of ``coder_plugin.evaluation.recall``."""
    out: dict[str, float] = {}
    for way, found in zip(("i2t", "t2i"), ranks(similarity, image_of_text), strict=True):
        for k in (1, 5, 10):
            out[f"{way}_r{k}"] = 100 * sum(rank < k for rank in found) / len(found)
        out[f"{way}_medr"] = math.floor(median(found)) + 1
        out[f"{way}_meanr"] = sum(found) / len(found) + 1
    out["rsum"] = sum(out[f"{way}_r{k}"] for way in ("i2t", "t2i") for k in (1, 5, 10))
    return out
