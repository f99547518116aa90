"""From an image's regions to what region models read: tensors of one shape, padded and masked.

Shapes: M most regions, R channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from coder_plugin.data.regions.base import Regions
from coder_plugin.data.source import Unusable
from coder_plugin.errors import CoderError


class RegionTransform:
    """Regions -> ``features`` float32 [M, R] and bool ``mask`` [M], and for a model that reads them ``boxes`` [M, 4]
    (fractions) with ``aspect`` [], the image's width over its height, or ``global`` [G], a feature of the whole image.

    Args:
        region_dim: R, checked. max_regions: M: the first M of the file's order are kept, fewer are padded.
        dropout: share of the regions that are left out at random, in training (VSE-infinity's 0.2); one always stays.
        boxes: whether the model reads them: an image without is then unusable.
        global_dim: G, checked, where the model reads that feature; likewise.
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
            raise CoderError("this model reads regions and the data are pictures: extract regions and name them: --regions")
        if regions.features.shape[1] != self.region_dim:
            raise CoderError(f"regions have {regions.features.shape[1]} channels; the model was made for {self.region_dim}")
        kept = self._kept(min(len(regions), self.max_regions))
        out = {
            "features": self._padded(regions.features, kept),
            "mask": torch.arange(self.max_regions) < len(kept),
        }
        if self.boxes:
            fractions = regions.fractions
            if fractions is None:
                raise Unusable("it has no boxes, which this model reads (--model-kwargs context=none does without)")
            out["boxes"] = self._padded(fractions, kept)
            out["aspect"] = torch.tensor(regions.size[0] / regions.size[1], dtype=torch.float32)
        if self.global_dim:
            whole = regions.whole
            if whole is None:
                raise Unusable(
                    "it has no feature of the whole image, which this model reads (--model-kwargs global_dim=0 does without)"
                )
            if len(whole) != self.global_dim:
                raise CoderError(f"whole images have {len(whole)} channels; the model was made for {self.global_dim}")
            out["global"] = torch.from_numpy(whole.astype(np.float32))
        return out

    def _kept(self, count: int) -> Tensor:
        if not self.dropout:
            return torch.arange(count)
        kept = (torch.rand(count) >= self.dropout).nonzero().squeeze(1)
        return kept if len(kept) else torch.randint(count, (1,))

    def _padded(self, rows: Any, kept: Tensor) -> Tensor:
        out = torch.zeros(self.max_regions, rows.shape[1])
        out[: len(kept)] = torch.from_numpy(rows[kept.numpy()].astype(np.float32))
        return out
