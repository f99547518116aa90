"""Validation in upstream's loop: recall of the retrieval vectors, in tiles, with several captions per image.

Upstream ranks the score matrix of all pairs at once, 23 bytes per entry, and counts other captions of an image as wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coder_plugin.evaluation import recall_from_embeddings
from coder_plugin.integrations.open_clip.model import VECTORS


class Collected:
    """Vectors and image ids of a pass over validation data, on the CPU."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, ...]] = []

    def hook(self, _module: Any, _inputs: Any, outputs: Any) -> None:
        """A forward hook of the model."""
        self.add(outputs)

    def add(self, outputs: Any) -> None:
        """Keep a batch's vectors, if it has any; the batches of zero-shot accuracy have none."""
        if isinstance(outputs, Mapping) and VECTORS[0] in outputs:
            image, text, ids = (outputs[key].detach().cpu() for key in VECTORS)
            self.batches.append((image.float(), text.float(), ids))

    def metrics(self) -> dict[str, float]:
        """Recalls under upstream's names, as shares, and ``rsum`` in percent; pairs with the same id are one image."""
        images, texts, ids = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        _, owner = ids.unique(return_inverse=True)
        first = torch.full((int(owner.max()) + 1,), len(ids)).scatter_reduce(0, owner, torch.arange(len(ids)), "amin")
        recalls = recall_from_embeddings(images[first], texts, owner)
        metrics: dict[str, float] = {}
        for ours, name in (("i2t", "image_to_text"), ("t2i", "text_to_image")):
            metrics[f"{name}_mean_rank"] = recalls[f"{ours}_meanr"]
            metrics[f"{name}_median_rank"] = recalls[f"{ours}_medr"]
            metrics |= {f"{name}_R@{k}": recalls[f"{ours}_r{k}"] / 100 for k in (1, 5, 10)}
        return {**metrics, "rsum": recalls["rsum"], "num_images": len(first)}


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
    """Number of rows with their target among the first k. Upstream's function (3.3) fails under NumPy 2.4."""
    hits = output.topk(max(topk), 1, True, True).indices.eq(target[:, None])
    return [float(hits[:, :k].sum()) for k in topk]
