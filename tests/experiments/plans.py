"""Points of a plan, and what their results could be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coder_plugin.evaluation import recall

EXPERIMENTS = Path(__file__).resolve().parents[2] / "scripts" / "experiments"


def points_of(plan: Any, setting: str) -> list[Any]:
    """All points, where each row's first is the chosen one."""

    def first(row: str) -> Any:
        return plan.grid(setting, row, first)[0]

    return [point for row in plan.rows_of(setting) for point in plan.grid(setting, row, first)]


def random_scores(seed: int, images: int = 40) -> tuple[list[float], float]:
    """What each image adds to R@sum where similarities are random, and R@sum."""
    import torch
    from flickr8k import image_scores

    similarity = torch.rand(images, 5 * images, generator=torch.Generator().manual_seed(seed))
    owner = torch.arange(images).repeat_interleave(5)
    similarity[owner, torch.arange(5 * images)] += 0.5
    figures = recall(similarity, owner)
    return image_scores(figures["i2t_ranks"].tolist(), figures["t2i_ranks"].tolist()), figures["rsum"]
