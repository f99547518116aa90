"""A detector together with a second network, which adds a feature of the entire picture to its regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from PIL.Image import Image
from torch import nn

from coder_plugin.data.regions.base import Regions
from coder_plugin.detectors.base import Detector, Prepared, make_detector
from coder_plugin.detectors.timm_ import Trunk


class WithGlobal(Detector):
    """A detector's regions with a feature of the whole picture from a second network."""

    def __init__(self, detector: Detector, trunk: Any) -> None:
        self.detector, self.trunk = detector, trunk
        self.width = detector.width
        self.preprocess = _Both(detector.preprocess, trunk.preprocess)

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.detector.modules, *self.trunk.modules]

    def detect(self, pictures: Sequence[Prepared]) -> list[Regions]:
        regions = self.detector.detect([Prepared(each.pixels[0], each.size) for each in pictures])
        features = self.trunk.pooled([Prepared(each.pixels[1], each.size) for each in pictures])
        return [replace(each, global_feature=feature) for each, feature in zip(regions, features, strict=True)]


class _Both:
    def __init__(self, *steps: Callable[[Image], Prepared]) -> None:
        self.steps = steps

    def __call__(self, picture: Image) -> Prepared:
        return Prepared(tuple(step(picture).pixels for step in self.steps), picture.size)


def make_detector_with_global(
    name: str, options: dict[str, Any], global_model: str | None, global_weights: str | None, *, device: str
) -> Detector:
    """A detector, with a second network of timm for a feature of the whole picture if ``global_model`` names one."""
    detector = make_detector(name, device=device, **options)
    if global_model is None:
        return detector
    allow_random = bool(options.get("allow_random"))
    return WithGlobal(detector, Trunk(global_model, weights=global_weights, allow_random=allow_random, device=device))
