"""Translate the state-dict names of bottom-up-attention.pytorch (a Caffe model in detectron2's modules) to those of ``c4``.

Derived from that project's module definitions, not tried on its files.
"""

from __future__ import annotations

import re

from torch import Tensor

_UNUSED = ("pixel_mean", "pixel_std", "proposal_generator.anchor_generator.", "roi_heads.box_predictor.bbox_pred.")
_PREFIXES = (
    ("backbone.stem.conv1.norm.", "trunk.bn1."),
    ("backbone.stem.conv1.", "trunk.conv1."),
    ("backbone.res2.", "trunk.layer1."),
    ("backbone.res3.", "trunk.layer2."),
    ("backbone.res4.", "trunk.layer3."),
    ("roi_heads.res5.", "res5."),
    ("proposal_generator.rpn_head.conv.", "rpn.head.conv.0.0."),
    ("proposal_generator.rpn_head.objectness_logits.", "rpn.head.cls_logits."),
    ("proposal_generator.rpn_head.anchor_deltas.", "rpn.head.bbox_pred."),
    ("roi_heads.box_predictor.", ""),
)


def translate_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names; unchanged if they do not have detectron2's names."""
    if not any(name.startswith("proposal_generator.") for name in weights):
        return weights
    return {
        _name(name): _objectness(value) if "objectness_logits" in name else value
        for name, value in weights.items()
        if not name.startswith(_UNUSED)
    }


def _name(name: str) -> str:
    for theirs, ours in _PREFIXES:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    name = re.sub(r"\.conv([123])\.norm\.", r".bn\1.", name)
    name = name.replace(".shortcut.norm.", ".downsample.1.").replace(".shortcut.", ".downsample.0.")
    return name


def _objectness(value: Tensor) -> Tensor:
    """Of twelve background and twelve foreground logits, the difference: its sigmoid is their softmax."""
    half = len(value) // 2
    return value[half:] - value[:half] if len(value) == 24 else value
