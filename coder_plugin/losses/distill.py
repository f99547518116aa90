"""Distillation from a frozen teacher, such as the weights that fine-tuning starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.functional.distill_loss import distill
from coder_plugin.losses.base import Term, options_of
from coder_plugin.losses.gathered import anchors_of_rank

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head


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

    @options_of(distill)
    def __init__(self, *, teacher: str = "base", temperature: float | None = None, **options: Any) -> None:
        super().__init__()
        self.kind, self.temperature = options["kind"], temperature
        self.head_options = {"teacher": {"weights": teacher}}
        if self.kind not in ("features", "similarity"):
            raise ValueError(f"kind must be 'features' or 'similarity', got {self.kind!r}")
        if temperature is not None and not temperature > 0:
            raise ValueError(f"temperature must be > 0, got {temperature}")
        if self.kind == "similarity":
            self.gathers = self.requires
            if temperature is None:
                self.requires = (*self.requires, "logit_scale", "coder_teacher_logit_scale")
        elif temperature is not None:
            raise ValueError("temperature is of kind='similarity': features are compared without one")

    def bind(self, heads: Mapping[str, Head], *, local_loss: bool) -> Term:
        super().bind(heads, local_loss=local_loss)
        if not heads:  # a loss without a model
            return self
        head, wanted = self.provider("coder_teacher_image_features"), self.head_options["teacher"]["weights"]
        if (weights := getattr(head, "weights", wanted)) != wanted:
            raise CoderError(f"the model was made with distill(teacher={weights!r}), and the loss asks for {wanted!r}")
        dims = getattr(head, "dims", None)
        if self.kind == "features" and dims is not None and dims[0] != dims[1]:
            raise CoderError(
                f"the teacher {wanted} has features of {dims[1]} dimensions, the model of {dims[0]}: they can be compared with "
                "distill(kind=similarity) only"
            )
        return self

    def ring_obstacle(self) -> str | None:
        return None if self.kind == "features" and type(self) is Distill else super().ring_obstacle()

    def compute_in_ring(self, *args: Any, **outputs: Any) -> Tensor:
        """The features of this rank's pairs are compared with their teacher's alone."""
        return self.compute(*args, **outputs)

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
