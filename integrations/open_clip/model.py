"""A model with heads in upstream's trainers: packed texts, locked towers, and retrieval vectors in evaluation."""

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
    """Mixed into the class of a model with heads that runs in open_clip's own trainer."""

    #: Names of the packed rows between text and id (3.3), and parameters that no term reads, which stay frozen.
    coder_rows: tuple[str, ...] = ()
    coder_unread: tuple[str, ...] = ()

    def forward(self, image: Any = None, text: Tensor | None = None, *args: Any, **keywords: Any) -> Any:
        """As :class:`CoderCLIP`'s forward. Texts may be packed, [B, n + 1, L]. In eval mode a batch with ids, as in validation,
        also gives the retrieval vectors, :data:`VECTORS`."""
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
            features = {**captured, f"{side}_features": feature}
            vectors.append(self.coder.embed(side, {**features, **self.coder.aggregate(features)}))  # type: ignore[attr-defined]
        return {**outputs, **dict(zip(VECTORS, (*vectors, ids), strict=True))}

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False, **options: Any) -> None:
        """Upstream's. BatchNorm's statistics are frozen in place, because upstream's way loses timm's activations."""
        super().lock_image_tower(unlocked_groups=unlocked_groups, freeze_bn_stats=False, **options)  # type: ignore[misc]
        if freeze_bn_stats:
            freeze_batch_norm(self.visual)  # type: ignore[attr-defined]
        self._freeze_unread()

    def lock_text_tower(self, *args: Any, **options: Any) -> None:
        super().lock_text_tower(*args, **options)  # type: ignore[misc]
        self._freeze_unread()

    def _freeze_unread(self) -> None:
        """Freeze the unread parameters again: DDP fails on parameters without a gradient."""
        parameters = dict(self.named_parameters())  # type: ignore[attr-defined]
        for name in self.coder_unread:
            parameters[name].requires_grad_(False)


def extend(model: CoderCLIP, rows: tuple[str, ...]) -> Any:
    """Extend the class of a model with heads for upstream's trainers, in place."""
    cls = type(model)
    model.__class__ = type(cls.__name__, (InUpstream, cls), {"__module__": cls.__module__})
    model.coder_rows = rows  # type: ignore[attr-defined]
    return model

