"""Regions from torchvision's Faster-RCNNs.

Features are the box head's output, 1024 channels in all of torchvision's models: *not* the 2048 of bottom-up-attention,
whose detector has another network, classes and training data (see ``c4``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import clip_boxes_to_image

from coder_plugin.data.regions.base import Regions
from coder_plugin.detectors.base import (
    Detector,
    Prepared,
    load_weights,
    make_device,
    need_weights,
    pixels,
    read_weights,
    seeded,
)
from coder_plugin.detectors.select import Choice, at_least_one, select, to_regions
from coder_plugin.errors import CoderError

_CLASSIFIER = "roi_heads.box_predictor.cls_score.weight"


class TorchVision(Detector):
    """Proposals selected by their class scores (:func:`~coder_plugin.detectors.select.select`), with the regressed box of
    the best class.

    Args:
        model: a Faster-RCNN builder of ``torchvision.models.detection``.
        weights: file of a state dict of that model, with any number of classes; ``default`` for torchvision's (a download);
            None for random ones, with ``allow_random``.
        regions, nms, min_score, min_regions: see :class:`~coder_plugin.detectors.select.Choice`.
    """

    preprocess = staticmethod(pixels)  # the model's own transform resizes, in ``detect``

    def __init__(
        self,
        *,
        model: str = "fasterrcnn_resnet50_fpn_v2",
        weights: str | None = None,
        regions: int = 36,
        nms: float = 0.3,
        min_score: float = 0.0,
        min_regions: int = 10,
        device: str = "cpu",
        allow_random: bool = False,
    ) -> None:
        from torchvision.models import detection, list_models

        models = [name for name in list_models(module=detection) if name.startswith("fasterrcnn_")]
        if model not in models:
            raise CoderError(f"detector torchvision has no model {model!r}; it has: {', '.join(models)}")
        need_weights(f"torchvision {model}", weights, allow_random)
        self.choice = Choice(regions, nms, min_score, min_regions)
        self.device = make_device(device)
        self.model = _build(model, weights).eval().requires_grad_(False).to(self.device)
        self.width = self.model.roi_heads.box_predictor.cls_score.in_features

    @torch.inference_mode()
    def detect(self, pictures: Sequence[Prepared]) -> list[Regions]:
        tensors = [torch.tensor(each.pixels).to(self.device).permute(2, 0, 1).float() / 255 for each in pictures]
        images, _ = self.model.transform(tensors)
        maps = self.model.backbone(images.tensors)
        heads = self.model.roi_heads
        proposals = at_least_one(self.model.rpn(images, maps)[0], images.image_sizes)
        features = heads.box_head(heads.box_roi_pool(maps, proposals, images.image_sizes))
        logits, shifts = heads.box_predictor(features)
        boxes = heads.box_coder.decode(shifts, proposals)
        counts = [len(each) for each in proposals]
        return [
            self._regions(*each)
            for each in zip(
                features.split(counts),
                logits.softmax(-1).split(counts),
                boxes.split(counts),
                images.image_sizes,
                [picture.size for picture in pictures],
                strict=True,
            )
        ]

    def _regions(
        self, features: Tensor, scores: Tensor, boxes: Tensor, resized: tuple[int, int], size: tuple[int, int]
    ) -> Regions:
        boxes = clip_boxes_to_image(boxes, resized)[:, 1:]  # class 0 is the background
        selected, classes, conf = select(scores[:, 1:], boxes, self.choice)
        return to_regions(
            features[selected], boxes[selected, classes], classes=classes, conf=conf, resized=resized, size=size
        )


def _build(name: str, weights: str | None) -> Any:
    from torchvision.models import get_model

    if weights == "default":
        try:
            return get_model(name, weights="DEFAULT")
        except Exception as exc:  # of urllib, the hub or torch
            raise CoderError(
                f"weights of {name} cannot be downloaded: {' '.join(str(exc).split())[:300]}; give --weights FILE"
            ) from exc
    content = None if weights is None else read_weights(weights)
    classes = 91
    if content is not None and _CLASSIFIER in content:
        classes = len(content[_CLASSIFIER])
    with seeded():
        model = get_model(name, weights=None, weights_backbone=None, num_classes=classes)
    if content is not None:
        load_weights(model, content, str(weights))
    return model
