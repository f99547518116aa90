"""A model with heads as upstream's trainers handle it: packed texts, tower locks, and retrieval vectors in evaluation."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from coder_plugin.backbones.clip import CoderCLIP
from coder_plugin.integrations.open_clip.data import unpack
from coder_plugin.training.prepare import freeze_batch_norm

#: The retrieval vectors of a batch whose image ids are known, in evaluation.
VECTORS = ("coder_image_vectors", "coder_text_vectors", "coder_ids")


class InUpstream:
    """Mixed into a model of :func:`coder_plugin.create_model`'s kind that runs in open_clip's own trainer."""

    #: The rows of packed texts between text and id (3.3), and the parameters that no term reads, frozen for good.
    coder_rows: tuple[str, ...] = ()
    coder_unread: tuple[str, ...] = ()

    def forward(self, image: Any = None, text: Tensor | None = None, *args: Any, **keywords: Any) -> Any:
        """As :class:`CoderCLIP`'s; texts may be packed, [B, n + 1, L]. In eval mode a batch with ids, as validation has, also
        gives the vectors that the model retrieves by: :data:`VECTORS`."""
        if text is not None and text.ndim == 3:
            text, further = unpack(text, self.coder_rows)
            keywords = {**further, **keywords}
        if self.training:  # type: ignore[attr-defined]
            return super().forward(image, text, *args, **keywords)  # type: ignore[misc]
        ids = keywords.pop("image_id", None)
        keywords = {key: value for key, value in keywords.items() if not key.startswith("text_")}
        if ids is None or image is None or text is None:
            return super().forward(image, text, *args, **keywords)  # type: ignore[misc]
        self._start_capture()  # type: ignore[attr-defined]
        outputs = super().forward(image, text, *args, **keywords)  # type: ignore[misc]
        captured = self._collect(text)  # type: ignore[attr-defined]
        vectors = []
        for side in ("image", "text"):
            feature = F.normalize(outputs[f"{side}_features"].float(), dim=-1)
            known = {**captured, f"{side}_features": feature}
            vectors.append(self.coder.embed(side, {**known, **self.coder.aggregate(known)}))  # type: ignore[attr-defined]
        return {**outputs, **dict(zip(VECTORS, (*vectors, ids), strict=True))}

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False, **options: Any) -> None:
        """Upstream's; BatchNorm's statistics are frozen in place, for upstream's own way loses timm's activations."""
        super().lock_image_tower(unlocked_groups=unlocked_groups, freeze_bn_stats=False, **options)  # type: ignore[misc]
        if freeze_bn_stats:
            freeze_batch_norm(self.visual)  # type: ignore[attr-defined]
        self._freeze_unread()

    def lock_text_tower(self, *args: Any, **options: Any) -> None:
        super().lock_text_tower(*args, **options)  # type: ignore[misc]
        self._freeze_unread()

    def _freeze_unread(self) -> None:
        """Unlocking a tower's last groups must not give DDP parameters without a gradient."""
        parameters = dict(self.named_parameters())  # type: ignore[attr-defined]
        for name in self.coder_unread:
            parameters[name].requires_grad_(False)


def extend(model: CoderCLIP, rows: tuple[str, ...]) -> Any:
    """Make a model with heads one that upstream's trainers can handle, in place."""
    cls = type(model)
    model.__class__ = type(cls.__name__, (InUpstream, cls), {"__module__": cls.__module__})
    model.coder_rows = rows  # type: ignore[attr-defined]
    return model

