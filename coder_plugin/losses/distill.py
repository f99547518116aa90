"""Distillation: a student's features, or its similarities, stay near a frozen teacher's (docs/equations.md#distill).

Shapes: n pairs, a anchors (n, or the share of one process), d and e dimensions of student and teacher, N pairs of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from coder_plugin.contrast.pairs import check_pair_shapes
from coder_plugin.errors import CoderError
from coder_plugin.losses.base import Term, anchors_of_rank
from coder_plugin.tensors import check_range, check_temperature, cosine, upcast

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head

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

    Use it in fine-tuning, where the model must keep what it knows: it holds the features near those it starts from.

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
    check_pair_shapes(image_features, text_features)
    check_pair_shapes(teacher_image_features, teacher_text_features)
    teacher_image_features, teacher_text_features = teacher_image_features.detach(), teacher_text_features.detach()
    check_range(image_features=image_features, text_features=text_features)
    student, teacher = (image_features, text_features), (teacher_image_features, teacher_text_features)
    rows = slice(None) if anchors is None else anchors
    if kind == "features":
        if image_features.shape != teacher_image_features.shape:
            raise ValueError(
                f"kind='features' needs features of one shape, got {tuple(image_features.shape)} of the student and "
                f"{tuple(teacher_image_features.shape)} of the teacher: take kind='similarity'"
            )
        distances = [
            (upcast(own[rows]) - upcast(other[rows])).square().sum(-1).mean()
            for own, other in zip(student, teacher, strict=True)
        ]
        return distances[0] + distances[1]
    if logit_scale is None or teacher_logit_scale is None:
        raise ValueError("kind='similarity' needs logit_scale and teacher_logit_scale")
    if len(image_features) != len(teacher_image_features):
        raise ValueError(f"{len(image_features)} pairs of the student, {len(teacher_image_features)} of the teacher")
    if isinstance(teacher_logit_scale, Tensor):
        teacher_logit_scale = teacher_logit_scale.detach()
    losses = []
    for side in (0, 1):  # images among all texts, texts among all images
        own, other = (cosine(features[side][rows], features[1 - side]) for features in (student, teacher))
        target = (teacher_logit_scale * other).softmax(1)
        losses.append(-(target * (logit_scale * own).log_softmax(1)).sum(1).mean())
    return (losses[0] + losses[1]) / 2


class Distill(Term):
    """:func:`coder_plugin.functional.distill`: keeps the model near a teacher, which reads the same pictures and captions.

    Args:
        teacher: ``base``, the weights that training starts from; or another model: ``MODEL/TAG`` of open_clip, such as
            ``ViT-B-32/laion2b_s34b_b79k``, the folder of an export, or a repository of the hub
            (:class:`~coder_plugin.heads.teacher.Teacher`).
        temperature: of ``kind=similarity``, for student and teacher, > 0. None: each takes its own ``logit_scale``, as in
            open_clip.

    Example:
        >>> import torch
        >>> teacher = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
        >>> Distill(kind="features")(torch.eye(2), torch.eye(2), teacher, torch.eye(2))
        tensor(0.4000)
        >>> Distill(kind="similarity", temperature=0.5)(torch.eye(2), torch.eye(2), torch.eye(2), torch.eye(2))
        tensor(0.3653)
    """

    requires: tuple[str, ...] = (
        "image_features", "text_features", "coder_teacher_image_features", "coder_teacher_text_features",
    )  # fmt: skip
    supports = frozenset({"same_image", "ring"})

    def __init__(self, *, kind: Kind = "features", teacher: str = "base", temperature: float | None = None) -> None:
        super().__init__()
        self.kind, self.temperature = kind, temperature
        self.head_options = {"teacher": {"weights": teacher}}
        if self.kind not in ("features", "similarity"):
            raise ValueError(f"kind must be 'features' or 'similarity', got {self.kind!r}")
        if temperature is not None:
            check_temperature(temperature)
        if self.kind == "similarity":
            self.gathers = self.requires
            self.supports -= {"ring"}
            if temperature is None:
                self.requires = (*self.requires, "logit_scale", "coder_teacher_logit_scale")
        elif temperature is not None:
            raise ValueError("temperature applies only to kind='similarity': features are compared without one")

    def bind(self, heads: Mapping[str, Head], *, local_loss: bool) -> Term:
        super().bind(heads, local_loss=local_loss)
        if not heads:  # a loss without a model
            return self
        head, wanted = self.provider("coder_teacher_image_features"), self.head_options["teacher"]["weights"]
        if (weights := getattr(head, "weights", wanted)) != wanted:
            raise CoderError(f"the model was created with distill(teacher={weights!r}), and the loss asks for {wanted!r}")
        dims = getattr(head, "dims", None)
        if self.kind == "features" and dims is not None and dims[0] != dims[1]:
            raise CoderError(
                f"the teacher {wanted} has features of {dims[1]} dimensions, the model of {dims[0]}: they can be compared with "
                "distill(kind=similarity) only"
            )
        return self

    def compute(
        self,
        image_features: Tensor,
        text_features: Tensor,
        coder_teacher_image_features: Tensor,
        coder_teacher_text_features: Tensor,
        logit_scale: Tensor | None = None,
        coder_teacher_logit_scale: Tensor | None = None,
    ) -> Tensor:
        """Student's features [N, D] and teacher's [N, E], L2-normalised, of all ranks for ``similarity``, of this one for
        ``features``; the student's scale, and the teacher's [B], the same for each pair -> scalar."""
        features = (image_features, text_features, coder_teacher_image_features, coder_teacher_text_features)
        if self.kind == "features":
            return distill(*features, kind="features")
        scales: tuple[Any, Any]
        if self.temperature is not None:
            scales = 1 / self.temperature, 1 / self.temperature
        else:
            assert coder_teacher_logit_scale is not None
            scales = logit_scale, coder_teacher_logit_scale[0]
        anchors = anchors_of_rank(len(image_features), local_loss=self.local_loss)
        return distill(
            *features, kind="similarity", logit_scale=scales[0], teacher_logit_scale=scales[1], anchors=anchors
        )
