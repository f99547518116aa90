"""Turn an image's regions into the input of region models: tensors of a fixed shape, padded and masked.

Shapes: M maximum number of regions, R channels of a region, G channels of the whole image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.regions.base import Regions
from coder_plugin.errors import CoderError


class RegionTransform:
    """Regions -> ``features`` float32 [M, R] and bool ``mask`` [M]; for a model that reads them also ``boxes`` [M, 4]
    (fractions) with ``aspect`` [] (width over height), or ``global`` [G], a feature of the whole image.

    Args:
        region_dim: R, checked.
        max_regions: M. The first M in the file's order are used; fewer are padded.
        dropout: probability of leaving a region out in training, in [0, 1) (VSE-infinity: 0.2); at least one stays.
        boxes: whether the model reads boxes. An image without boxes is then unusable.
        global_dim: G, checked, if the model reads a feature of the whole image, else 0. An image without is unusable.

    Raises:
        CoderError: an option out of range, or pictures instead of regions.
        BadSample: regions of another width than the model's, or an image that lacks what the model reads.

    Example:
        >>> import numpy as np
        >>> batch = RegionTransform(4, max_regions=3)(Regions(np.ones((2, 4), np.float32)))
        >>> batch["features"].shape, batch["mask"].tolist()
        (torch.Size([3, 4]), [True, True, False])
    """

    def __init__(
        self, region_dim: int, *, max_regions: int = 36, dropout: float = 0.0, boxes: bool = False, global_dim: int = 0
    ) -> None:
        if max_regions < 1:
            raise CoderError(f"max regions must be 1 or more, got {max_regions}")
        if not 0 <= dropout < 1:
            raise CoderError(f"region dropout must be in [0, 1), got {dropout}")
        self.region_dim, self.max_regions, self.dropout = region_dim, max_regions, dropout
        self.boxes, self.global_dim = boxes, global_dim

    def __call__(self, regions: Any) -> dict[str, Tensor]:
        if not isinstance(regions, Regions):
            raise CoderError("this model reads regions, but the data are pictures: extract regions, then give --regions FILES")
        if regions.features.shape[1] != self.region_dim:
            raise BadSample(
                "regions", f"regions have {regions.features.shape[1]} channels, but the model reads {self.region_dim}"
            )
        count = min(len(regions), self.max_regions)
        rows = self._drop(count) if self.dropout else slice(count)
        features = regions.features[rows]
        out = {"features": self._padded(features), "mask": torch.arange(self.max_regions) < len(features)}
        if self.boxes:
            fractions = regions.fractions
            if fractions is None:
                raise BadSample("regions", "it has no boxes, which this model reads (--model-kwargs boxes=false does not)")
            out["boxes"] = self._padded(fractions[rows])
            out["aspect"] = torch.tensor(regions.size[0] / regions.size[1], dtype=torch.float32)
        if self.global_dim:
            feature = regions.global_feature
            if feature is None:
                raise BadSample(
                    "regions",
                    "it has no feature of the whole image, which this model reads (--model-kwargs global_dim=0 does not)",
                )
            if len(feature) != self.global_dim:
                raise BadSample(
                    "regions", f"whole images have {len(feature)} channels, but the model reads {self.global_dim}"
                )
            out["global"] = torch.from_numpy(feature.astype(np.float32))
        return out

    def _drop(self, count: int) -> np.ndarray:
        rows = (torch.rand(count) >= self.dropout).nonzero().squeeze(1)
        return (rows if len(rows) else torch.randint(count, (1,))).numpy()

    def _padded(self, values: np.ndarray) -> Tensor:
        out = torch.empty(self.max_regions, values.shape[1])
        array = out.numpy()
        array[: len(values)], array[len(values) :] = values, 0
        return out
