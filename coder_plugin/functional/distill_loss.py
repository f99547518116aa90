"""Distillation: a student's features, or its similarities, stay near a teacher's.

Shapes: n pairs, a anchors (n, or the rows of one process), d and e dimensions of student and teacher.
Equations and choices: docs/equations.md#distill.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from coder_plugin.functional.similarity import anchor_rows, batch_cosines, check_pairs, check_range, raise_precision

Kind = Literal["features", "similarity"]


def distill(
    image_features: Tensor,
    text_features: Tensor,
    teacher_image_features: Tensor,
    teacher_text_features: Tensor,
    *,
    kind: Kind = "features",
    logit_scale: Tensor | float | None = None,
    teacher_logit_scale: Tensor | float | None = None,
    anchors: slice | None = None,
) -> Tensor:
    """How far a student is from its teacher (CLIP-KD; Yang et al., CVPR 2024).

    ``features``: ``mean_i |v_i - v'_i|^2 + |t_i - t'_i|^2`` over the pairs, with v and t the student's features of image and
    text and v' and t' the teacher's. Of unit vectors this is twice ``(1 - cosine)`` of each. With the weights before
    fine-tuning as the teacher this is the regulariser of LDIFS (Mukhoti et al., TMLR 2024) on the joint features.

    ``similarity``: the cross-entropy of the softmax over all texts of an image, teacher's to student's, and the same for
    the images of a text; the mean of both directions. This is ``open_clip.DistillClipLoss``'s distillation. Its least value is
    the entropy of the teacher's distributions, not 0.

    Args:
        image_features: the student's, L2-normalised [n, d]; row i belongs to row i of ``text_features`` [n, d].
        teacher_image_features: the teacher's, L2-normalised [n, e], and ``teacher_text_features`` [n, e]; ``features`` needs
            e = d.
        kind: ``"features"`` or ``"similarity"``.
        logit_scale: of ``similarity``: 1 / temperature of the student, > 0. teacher_logit_scale: of the teacher.
        anchors: the rows of the batch that are compared; None: all rows.

    Returns:
        Scalar >= 0, float32 or float64. No gradient reaches the teacher's features and scale.

    Raises:
        ValueError: an unknown kind, shapes that do not fit, ``similarity`` without both scales.

    Example:
        >>> import torch
        >>> student, teacher = torch.eye(2), torch.tensor([[0.6, 0.8], [0.0, 1.0]])
        >>> distill(student, student, teacher, student)  # |(0.4, -0.8)|^2 / 2
        tensor(0.4000)
        >>> distill(student, student, student, student, kind="similarity", logit_scale=2.0, teacher_logit_scale=2.0)
        tensor(0.3653)
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be {' or '.join(map(repr, get_args(Kind)))}, got {kind!r}")
    check_pairs(image_features, text_features)
    check_pairs(teacher_image_features, teacher_text_features)
    teacher_image_features, teacher_text_features = teacher_image_features.detach(), teacher_text_features.detach()
    check_range(image_features=image_features, text_features=text_features)
    student, teacher = (image_features, text_features), (teacher_image_features, teacher_text_features)
    if kind == "features":
        if image_features.shape != teacher_image_features.shape:
            raise ValueError(
                f"kind='features' needs features of one shape, got {tuple(image_features.shape)} of the student and "
                f"{tuple(teacher_image_features.shape)} of the teacher: take kind='similarity'"
            )
        pairs = [(anchor_rows(own, anchors), anchor_rows(other, anchors)) for own, other in zip(student, teacher, strict=True)]
        own, other = ((raise_precision(own) - raise_precision(other)).square().sum(-1).mean() for own, other in pairs)
        return own + other
    if logit_scale is None or teacher_logit_scale is None:
        raise ValueError("kind='similarity' needs logit_scale and teacher_logit_scale")
    if len(image_features) != len(teacher_image_features):
        raise ValueError(f"{len(image_features)} pairs of the student, {len(teacher_image_features)} of the teacher")
    if isinstance(teacher_logit_scale, Tensor):
        teacher_logit_scale = teacher_logit_scale.detach()
    losses = []
    for own, other in zip(_directions(*student, anchors), _directions(*teacher, anchors), strict=True):
        target = (teacher_logit_scale * other).softmax(1)
        losses.append(-(target * (logit_scale * own).log_softmax(1)).sum(1).mean())
    return (losses[0] + losses[1]) / 2


def _directions(image_features: Tensor, text_features: Tensor, anchors: slice | None) -> tuple[Tensor, Tensor]:
    """Cosines [a, n] of images and all texts, and of texts and all images."""
    similarity, transposed = batch_cosines(image_features, text_features, anchors)
    return similarity, similarity.T if transposed is None else transposed
