"""A ResNet-101 C4 Faster-RCNN like bottom-up-attention's, whose 2048-channel features the field's region files hold.

From its ``test.prototxt`` and ``generate_tsv.py``: BGR pixels minus their means, short side 600 and long side at most 1000;
strides in the 1x1 convolutions; proposals on res4 (12 anchors, top 300); RoI max pooling to 14x14; res5 with stride 1 and
dilation 2 on each; the feature is the mean of its output. Class 0 is the background. The boxes of the regions, and those that
suppression compares, are the proposals themselves, without box regression.

State-dict names are torchvision's of a ResNet: ``trunk.conv1`` … ``trunk.layer3``, ``res5.0`` … ``res5.2`` for layer4's
blocks, and ``rpn.head.conv.0.0``, ``rpn.head.cls_logits`` (12 logits of objectness), ``rpn.head.bbox_pred`` (48),
``cls_score`` (classes with the background), and, with attributes, ``cls_embed``, ``attr_linear1``, ``attr_linear2``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet101
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FrozenBatchNorm2d, roi_pool

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

_MEANS = (102.9801, 115.9465, 122.7717)  # blue, green, red
_STRIDE = 16


class Network(nn.Module):
    """Trunk, proposal network and heads. :class:`C4` runs them, since it needs intermediate results."""

    def __init__(self, *, classes: int, attributes: int, proposals: int) -> None:
        super().__init__()
        net = resnet101(weights=None, norm_layer=FrozenBatchNorm2d, zero_init_residual=True)
        net.maxpool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        for stage in (net.layer2, net.layer3):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
        for block in net.layer4:
            block.conv2.stride, block.conv2.dilation, block.conv2.padding = (1, 1), (2, 2), (2, 2)
        net.layer4[0].downsample[0].stride = (1, 1)
        names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")
        self.trunk = nn.Sequential(OrderedDict((name, getattr(net, name)) for name in names))
        self.res5 = net.layer4
        grid = AnchorGenerator(((64, 128, 256, 512),), ((0.5, 1.0, 2.0),))
        grid.cell_anchors = [anchors()]
        keep = {"training": proposals, "testing": proposals}
        first = {"training": 6000, "testing": 6000}
        head = RPNHead(1024, 12)
        head.conv[0][0] = nn.Conv2d(1024, 512, 3, padding=1)
        head.cls_logits, head.bbox_pred = nn.Conv2d(512, 12, 1), nn.Conv2d(512, 48, 1)
        self.rpn = RegionProposalNetwork(grid, head, 0.7, 0.3, 256, 0.5, first, keep, 0.7)
        self.rpn.min_size = 16
        self.cls_score = nn.Linear(2048, classes)
        for layer in (head.cls_logits, head.bbox_pred, self.cls_score):  # untrained, their inputs are in the hundreds
            nn.init.normal_(layer.weight, std=1e-4)
            nn.init.zeros_(layer.bias)
        if attributes:
            self.cls_embed = nn.Embedding(classes, 256)
            self.attr_linear1, self.attr_linear2 = nn.Linear(2048 + 256, 512), nn.Linear(512, attributes)


class C4(Detector):
    """Regions of :class:`Network`, selected as in bottom-up-attention.

    They have ``attrs_id`` and ``attrs_conf`` if the weights have attributes.

    Args:
        weights: file of a state dict (names: see the module); None for random ones, with ``allow_random``.
        regions, nms, min_score, min_regions: see :class:`~coder_plugin.detectors.select.Choice`.
        image_size, max_size: length in pixels of the resized picture's short side, and maximum of its long side.
        proposals: number of proposals a picture.
    """

    width = 2048
    preprocess = staticmethod(pixels)

    def __init__(
        self,
        *,
        weights: str | None = None,
        regions: int = 36,
        nms: float = 0.3,
        min_score: float = 0.0,
        min_regions: int = 10,
        image_size: int = 600,
        max_size: int = 1000,
        proposals: int = 300,
        device: str = "cpu",
        allow_random: bool = False,
    ) -> None:
        need_weights("detector c4", weights, allow_random)
        self.choice = Choice(regions, nms, min_score, min_regions)
        self.device = make_device(device)
        content = None if weights is None else read_weights(weights)
        classes, attributes = 1601, 0
        if content is not None:
            classes, attributes = (len(content.get(name, ())) for name in ("cls_score.weight", "attr_linear2.weight"))
        with seeded():
            model = Network(classes=classes or 1601, attributes=attributes, proposals=proposals)
        if content is not None:
            load_weights(model, content, str(weights))
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.transform = GeneralizedRCNNTransform(image_size, max_size, list(_MEANS), [1.0, 1.0, 1.0])

    @torch.inference_mode()
    def detect(self, pictures: Sequence[Prepared]) -> list[Regions]:
        tensors = [torch.tensor(each.pixels).to(self.device).permute(2, 0, 1).flip(0).float() for each in pictures]
        images, _ = self.transform(tensors)
        net: Any = self.model
        maps = net.trunk(images.tensors)
        proposals = at_least_one(net.rpn(images, {"0": maps})[0], images.image_sizes)
        return [
            self._regions(maps[number : number + 1], proposals[number], images.image_sizes[number], each.size)
            for number, each in enumerate(pictures)  # one by one: 300 proposals are a large enough batch
        ]

    def _regions(self, maps: Tensor, boxes: Tensor, resized: tuple[int, int], size: tuple[int, int]) -> Regions:
        net: Any = self.model
        features = net.res5(roi_pool(maps, [boxes], 14, 1 / _STRIDE)).mean((2, 3))
        logits = net.cls_score(features)
        selected, classes, conf = select(logits.softmax(-1)[:, 1:], boxes, self.choice)
        extras = {}
        if hasattr(net, "cls_embed"):
            joined = torch.cat([features[selected], net.cls_embed(logits[selected].argmax(-1))], -1)
            odds = net.attr_linear2(F.relu(net.attr_linear1(joined))).softmax(-1)[:, 1:]
            extras["attrs_conf"], extras["attrs_id"] = odds.max(-1)
        return to_regions(
            features[selected],
            boxes[selected],
            classes=classes,
            conf=conf,
            resized=resized,
            size=size,
            extras=extras,
        )


def anchors() -> Tensor:
    """py-faster-rcnn's anchors of a cell, [12, 4]: centred at 7.5, with rounded sides.

    Its boxes include their right and bottom pixels; one more pixel there gives the same proposals in torchvision.
    """
    rows = []
    for width, height in ((23, 12), (16, 16), (11, 22)):  # 256 pixels in proportions 1:2, 1:1 and 2:1
        for scale in (4, 8, 16, 32):
            across, down = (width * scale - 1) / 2, (height * scale - 1) / 2
            rows.append([7.5 - across, 7.5 - down, 7.5 + across + 1, 7.5 + down + 1])
    return torch.tensor(rows)
