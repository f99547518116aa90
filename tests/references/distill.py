"""Distillation the slow way: one pair, one anchor and one candidate after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def of_features(images: Rows, texts: Rows, teacher_images: Rows, teacher_texts: Rows) -> float:
    """The mean over pairs of both squared distances."""
    total = 0.0
    for rows, others in ((images, teacher_images), (texts, teacher_texts)):
        for row, other in zip(rows, others, strict=True):
            total += math.fsum((a - b) ** 2 for a, b in zip(row, other, strict=True)) / len(rows)
    return total


def of_similarity(
    images: Rows, texts: Rows, teacher_images: Rows, teacher_texts: Rows, scale: float, teacher_scale: float
) -> float:
    """The mean over anchors and directions of the cross-entropy of the teacher's softmax and the student's."""
    n, total = len(images), 0.0
    for own, others in (((images, texts), (teacher_images, teacher_texts)), ((texts, images), (teacher_texts, teacher_images))):
        for anchor in range(n):
            student = [scale * _dot(own[0][anchor], candidate) for candidate in own[1]]
            teacher = [teacher_scale * _dot(others[0][anchor], candidate) for candidate in others[1]]
            norm = math.log(math.fsum(math.exp(each) for each in student))
            weights = [math.exp(each) for each in teacher]
            total -= math.fsum(w / math.fsum(weights) * (s - norm) for w, s in zip(weights, student, strict=True)) / n
    return total / 2


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
