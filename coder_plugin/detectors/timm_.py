"""Grid features: the cells of the final feature map of any timm model as regions that tile the picture.

Shapes: N pictures, R channels, h and w rows and columns of the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from coder_plugin.data.regions.base import Regions, grid_boxes
from coder_plugin.detectors.base import (
    Detector,
    Prepared,
    load_weights,
    make_device,
    need_weights,
    read_weights,
    seeded,
)
from coder_plugin.errors import CoderError


@dataclass(frozen=True)
class Squash:
    """Resize to (width, height) regardless of proportions, so that cells of the map are cells of the picture."""

    width: int
    height: int
    interpolation: str = "bicubic"

    def __call__(self, picture: Image.Image) -> Prepared:
        method = Image.Resampling[self.interpolation.upper()]
        resized = picture.convert("RGB").resize((self.width, self.height), method)
        return Prepared(np.asarray(resized), picture.size)


class Trunk:
    """A timm model up to its final feature map, with the preprocessing of its pretrained configuration.

    Args:
        model: timm's name.
        weights: a file with timm's names, or with tensors in the model's order and shapes; ``default`` for timm's own (a
            download); None for random ones, with ``allow_random``.
        image_size: side in pixels of the square that pictures are squashed to (default: the model's).
        image_mean, image_std: of the input in [0, 1], three numbers each (default: the model's).
    """

    def __init__(
        self,
        model: str,
        *,
        weights: str | None = None,
        image_size: int | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        device: str = "cpu",
        allow_random: bool = False,
    ) -> None:
        import timm

        need_weights(f"timm:{model}", weights, allow_random)
        self.device = make_device(device)
        try:
            with seeded():
                network: Any = timm.create_model(model, pretrained=weights == "default")
        except Exception as exc:  # unknown names, and errors of a download
            raise CoderError(f"timm model {model!r} cannot be built: {' '.join(str(exc).split())[:300]}") from exc
        config = network.pretrained_cfg
        if weights not in (None, "default"):
            _load(network, str(weights), config.get("classifier"))
        height, width = (image_size, image_size) if image_size else config["input_size"][1:]
        if image_size and hasattr(network, "set_input_size"):  # transformers have a position embedding for each cell
            network.set_input_size(img_size=(height, width))
        self.preprocess = Squash(width, height, config.get("interpolation") or "bicubic")
        self.model = network.eval().requires_grad_(False).to(self.device, memory_format=torch.channels_last)
        self._mean = _three("--image-mean", image_mean or config["mean"]).to(self.device)
        self._std = _three("--image-std", image_std or config["std"]).to(self.device)

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model]

    def tokens(self, pictures: Sequence[Prepared]) -> Tensor:
        """The model's final map or tokens, in its own layout."""
        batch = torch.from_numpy(np.stack([each.pixels for each in pictures])).to(self.device)
        batch = batch.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.channels_last)
        return self.model.forward_features(batch.div_(255).sub_(self._mean).div_(self._std))

    def map(self, pictures: Sequence[Prepared]) -> Tensor:
        """The input of the model's global pooling, [N, R, h, w]."""
        features = self.tokens(pictures)
        if features.ndim == 4:
            last = getattr(self.model, "output_fmt", "NCHW") == "NHWC"
            return features.permute(0, 3, 1, 2) if last else features
        cells = features[:, getattr(self.model, "num_prefix_tokens", 0) :]
        height, width = getattr(getattr(self.model, "patch_embed", None), "grid_size", (0, 0))
        if features.ndim != 3 or cells.shape[1] != height * width:
            raise CoderError(
                f"{type(self.model).__name__} gives features of shape {list(features.shape)}, which are not a grid of cells"
            )
        return cells.transpose(1, 2).unflatten(2, (height, width))

    @torch.inference_mode()
    def pooled(self, pictures: Sequence[Prepared]) -> np.ndarray:
        """The model's own pooled representation, the input of its classifier: [N, G] float32."""
        features = self.model.forward_head(self.tokens(pictures), pre_logits=True)
        return features.float().cpu().numpy()


class Timm(Detector):
    """Each cell of the final map is a region, row by row from the top left.

    Args:
        model, weights, image_size, image_mean, image_std, allow_random: see :class:`Trunk`.
        grid: cells a side, by adaptive average pooling (default: the map's). Boxes are even cells; where the map's side is
            not a multiple of ``grid``, averages extend over their borders by less than a cell of the map.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        weights: str | None = None,
        grid: int | None = None,
        image_size: int | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        device: str = "cpu",
        allow_random: bool = False,
    ) -> None:
        if model is None:
            raise CoderError("detector timm needs a model: set --detector-model, such as resnet50")
        if grid is not None and grid < 1:
            raise CoderError(f"--grid is {grid}; it must be 1 or more")
        self.trunk = Trunk(
            model,
            weights=weights,
            image_size=image_size,
            image_mean=image_mean,
            image_std=image_std,
            device=device,
            allow_random=allow_random,
        )
        self.grid = grid
        self.preprocess = self.trunk.preprocess
        self.width = self._map([self.preprocess(Image.new("RGB", (8, 8)))]).shape[1]

    @property
    def modules(self) -> list[nn.Module]:
        return self.trunk.modules

    @torch.inference_mode()
    def _map(self, pictures: Sequence[Prepared]) -> Tensor:
        features = self.trunk.map(pictures)
        if self.grid is not None and features.shape[2:] != (self.grid, self.grid):
            features = F.adaptive_avg_pool2d(features, self.grid)
        return features

    def detect(self, pictures: Sequence[Prepared]) -> list[Regions]:
        features = self._map(pictures)
        rows, columns = features.shape[2:]
        cells = features.flatten(2).transpose(1, 2).float().cpu().contiguous().numpy()
        boxes = grid_boxes(rows, columns)
        return [
            Regions(cell, boxes * np.array(each.size * 2, np.float32), each.size)
            for cell, each in zip(cells, pictures, strict=True)
        ]


def _three(flag: str, numbers: Sequence[float]) -> Tensor:
    if len(numbers) != 3:
        raise CoderError(f"{flag} has {len(numbers)} numbers; it must have three: red, green, blue")
    return torch.tensor(list(numbers), dtype=torch.float32).reshape(1, 3, 1, 1)


def _load(network: nn.Module, path: str, classifier: Any) -> None:
    """Load weights by name, without the classifier (no feature depends on it); or by order, if all shapes agree."""
    weights = read_weights(path)
    heads = tuple(f"{name}." for name in ([classifier] if isinstance(classifier, str) else classifier or ()))
    expected = network.state_dict()
    if not set(weights) & set(expected):
        names = [n for n in expected if len(weights) == len(expected) or not n.endswith("num_batches_tracked")]
        if [tuple(expected[n].shape) for n in names] == [tuple(each.shape) for each in weights.values()]:
            weights = dict(zip(names, weights.values(), strict=True))
    features = {name: value for name, value in weights.items() if not name.startswith(heads)} if heads else weights
    classifiers = {name: value for name, value in expected.items() if name.startswith(heads)} if heads else {}
    load_weights(network, {**features, **classifiers}, path)
