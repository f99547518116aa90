"""A data set with the numbers of a benchmark's images and captions, without pictures, and vectors of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor


def write_karpathy(path: Path, image_of: Mapping[int, int], order: Sequence[int], *, extra: Mapping[int, int] = {}) -> str:  # noqa: B006
    """A Karpathy file of one split, captions in ``order``; ``extra`` captions, number to image, come last."""
    captions: dict[int, list[int]] = {}
    for caption in order:
        captions.setdefault(image_of[caption], []).append(caption)
    for caption, image in extra.items():
        captions[image].append(caption)
    images = [
        {
            "filename": f"COCO_val2014_{image:012d}.jpg",
            "filepath": "val2014",
            "cocoid": image,
            "imgid": place,
            "split": "test",
            "sentences": [{"raw": f"caption {caption}", "sentid": caption} for caption in own],
        }
        for place, (image, own) in enumerate(captions.items())
    ]
    path.write_text(json.dumps({"dataset": "coco", "images": images}))
    return str(path)


def vectors(owner: Tensor, images: int, *, noise: float, dim: int = 16) -> tuple[Tensor, Tensor]:
    """Unit images [N, D] and texts [T, D], each its image's with noise."""
    rng = torch.Generator().manual_seed(0)
    image = torch.nn.functional.normalize(torch.randn(images, dim, generator=rng), dim=-1)
    text = image[owner] + noise * torch.randn(len(owner), dim, generator=rng)
    return image, torch.nn.functional.normalize(text, dim=-1)
