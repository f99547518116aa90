"""Small heads: inputs and backbone outputs passed on to terms, a count of epochs, and the overlap of views.

Shapes: B batch, D joint dimension, L image tokens, T text positions, C channels of tokens, V views, n hard negatives of
an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin.heads.base import BackboneInfo, Head, TrainingFacts
from coder_plugin.heads.capabilities import KeepsState
from coder_plugin.tensors import upcast


class Ids(Head):
    """Image ids for terms that mask captions of one image: ``image_id``, int64 [B], 63-bit hashes of image keys, is
    provided unchanged as ``coder_ids``.

    Example:
        >>> Ids(BackboneInfo(embed_dim=1))(image_id=torch.tensor([7, 8]))
        {'coder_ids': tensor([7, 8])}
    """

    requires = ("image_id",)
    provides = ("coder_ids",)

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    def forward(self, image_id: Tensor) -> dict[str, Tensor]:
        return {"coder_ids": image_id}


class Tokens(Head):
    """The towers' last-layer tokens for terms that compare tokens, those of texts padded to the input's length T.

    Requires ``image_tokens`` [B, L, C], ``image_mask`` [B, L], ``text_tokens`` [B, T', C], ``text_mask`` [B, T'] and
    ``text`` [B, T], T' <= T. Provides them as ``coder_image_tokens``, ``coder_image_mask``, ``coder_text_tokens``
    [B, T, C] and ``coder_text_mask`` [B, T].

    Example:
        >>> tokens, mask = torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
        >>> out = Tokens(BackboneInfo(embed_dim=4))(tokens, mask, tokens, mask, torch.zeros(2, 5, dtype=torch.int64))
        >>> out["coder_text_tokens"].shape, out["coder_text_mask"][0].tolist()
        (torch.Size([2, 5, 4]), [True, True, True, False, False])
    """

    requires = ("image_tokens", "image_mask", "text_tokens", "text_mask", "text")
    provides = ("coder_image_tokens", "coder_image_mask", "coder_text_tokens", "coder_text_mask")

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    def forward(
        self, image_tokens: Tensor, image_mask: Tensor, text_tokens: Tensor, text_mask: Tensor, text: Tensor
    ) -> dict[str, Tensor]:
        missing = text.shape[1] - text_tokens.shape[1]
        return {
            "coder_image_tokens": image_tokens,
            "coder_image_mask": image_mask,
            "coder_text_tokens": F.pad(text_tokens, (0, 0, 0, missing)),
            "coder_text_mask": F.pad(text_mask, (0, missing)),
        }


class Views(Head):
    """``||A^T A - I||_F^2`` of an image's region scores A, each view's scores of unit length (CAMERA, Qu et al., ACM MM
    2020, released code).

    Requires ``image_views`` [B, L, V], the scores of L regions for V views. Provides ``coder_view_overlap`` [B].

    Example:
        >>> Views(BackboneInfo(embed_dim=1))(torch.eye(3)[None])["coder_view_overlap"]
        tensor([0.])
    """

    requires = ("image_views",)
    provides = ("coder_view_overlap",)

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    def forward(self, image_views: Tensor) -> dict[str, Tensor]:
        with torch.autocast(image_views.device.type, enabled=False):
            scores = F.normalize(upcast(image_views), dim=1)
            overlap = scores.transpose(1, 2) @ scores
            overlap = overlap - torch.eye(overlap.shape[-1], device=overlap.device, dtype=overlap.dtype)
            return {"coder_view_overlap": overlap.square().sum((1, 2))}


class HardNegatives(Head):
    """Features of hard negatives, texts that are wrong for an image and come with the batch, and their images' ids.

    Requires ``text_negatives`` [B, n, T] and ``text_negative_ids`` [B, n]. Provides ``coder_negative_features``
    [B, n, D], L2-normalised, if a term reads them: the text tower encodes them in the same pass as the captions; and
    ``coder_negative_ids`` [B, n], the images that they are captions of: -1 where that is not known, -2 without a text.

    Example:
        >>> ids, features = torch.tensor([[7, -2]]), torch.eye(2)[None]
        >>> out = HardNegatives(BackboneInfo(embed_dim=2))(torch.ones(1, 2, 5), ids, features)
        >>> out["coder_negative_ids"], out["coder_negative_features"].shape
        (tensor([[ 7, -2]]), torch.Size([1, 2, 2]))
    """

    requires = ("text_negatives", "text_negative_ids")
    optional = ("negative_features",)
    provides = ("coder_negative_features", "coder_negative_ids")

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    @property
    def encodes_negatives(self) -> bool:
        return "coder_negative_features" in self.requested_keys

    def forward(
        self, text_negatives: Tensor, text_negative_ids: Tensor, negative_features: Tensor | None = None
    ) -> dict[str, Tensor]:
        features = {} if negative_features is None else {"coder_negative_features": negative_features}
        return {**features, "coder_negative_ids": text_negative_ids}


class Progress(KeepsState):
    """Counts performed optimizer steps, and the epochs that they make, for terms that change from one epoch to the next
    (docs/equations.md#score).

    Requires ``image_features`` [B, D]. Provides ``coder_epoch`` int64 [B], the number of epochs done, the same in each
    row: 0 in the first epoch.

    Args:
        steps_per_epoch: optimizer steps of an epoch, >= 1; a trainer derives it from the data. It may change when a run
            is resumed, as with another number of ranks: epochs that are done stay done.

    Raises:
        ValueError: ``steps_per_epoch`` below 1 or missing.

    Example:
        >>> head = Progress(BackboneInfo(embed_dim=1), steps_per_epoch=2)
        >>> for step in range(3):
        ...     print(head(image_features=torch.ones(4, 1))["coder_epoch"].tolist())
        ...     head.post_step()
        [0, 0, 0, 0]
        [0, 0, 0, 0]
        [1, 1, 1, 1]
    """

    requires = ("image_features",)
    provides = ("coder_epoch",)
    data_options = ("steps_per_epoch",)
    free_on_resume = ("steps_per_epoch",)  # it depends on the number of ranks

    epoch: Tensor
    steps: Tensor

    def __init__(self, backbone: BackboneInfo, *, steps_per_epoch: int | None = None) -> None:
        super().__init__()
        if steps_per_epoch is None:
            raise ValueError(
                "missing required option steps_per_epoch: a trainer derives it from the data; elsewhere set it, such "
                "as with the option progress.steps_per_epoch=200"
            )
        if steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be >= 1, got {steps_per_epoch}")
        self.steps_per_epoch = steps_per_epoch
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # of the epoch that is not done

    @classmethod
    def options_from_data(cls, options: Mapping[str, Any], facts: TrainingFacts) -> dict[str, Any]:
        """The steps of an epoch; 1 where no step is planned, as in an evaluation."""
        if "steps_per_epoch" in options:
            return {}
        samples = facts.samples_per_epoch
        return {"steps_per_epoch": max(1, samples // (facts.pairs_per_step or samples or 1))}

    def forward(self, image_features: Tensor) -> dict[str, Tensor]:
        return {"coder_epoch": self.epoch.expand(len(image_features))}

    def post_step(self) -> None:
        self.steps += 1
        done = self.steps >= self.steps_per_epoch
        self.epoch += done
        self.steps *= ~done
        super().post_step()
