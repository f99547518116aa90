"""Where the regions of an image lie in it, and the picture that they lie in.

Shapes: L regions, H W pixels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from coder_plugin.errors import CoderError

#: Pixels of the longer side of a canvas that stands for a picture nobody has.
_CANVAS = 320


def grid_of(model: Any, count: int) -> tuple[int, int]:
    """Rows and columns of the ``count`` cells (row by row) that an open_clip image tower gives.

    ViTs know their grid. Other towers' cells are as wide as high, so that theirs is the grid of ``count`` cells whose
    aspect is nearest to the picture's.

    Raises:
        CoderError: no grid of so many cells is near it.
    """
    visual = model.visual
    for owner in (visual, getattr(getattr(visual, "trunk", None), "patch_embed", None)):
        grid = getattr(owner, "grid_size", None)
        if grid is not None and math.prod(grid) == count:
            return int(grid[0]), int(grid[1])
    size = visual.image_size
    height, width = (size, size) if isinstance(size, int) else size

    def off(rows: int) -> float:
        return abs(math.log(rows / (count // rows) * width / height))

    rows = min((rows for rows in range(1, count + 1) if count % rows == 0), key=off)
    if off(rows) > math.log(1.9):
        what = f"{type(visual).__name__} gives {count} features of a picture of {height} x {width}"
        raise CoderError(f"{what}, which make no grid to draw")
    return rows, count // rows


def grid_boxes(rows: int, columns: int) -> np.ndarray:
    """The cells of a grid, row by row, as boxes [L, 4] float32: left, top, right, bottom, fractions of the picture."""
    row, column = np.divmod(np.arange(rows * columns), columns)
    return np.stack([column / columns, row / rows, (column + 1) / columns, (row + 1) / rows], 1).astype(np.float32)


def tower_picture(image: Tensor, preprocess: Any) -> np.ndarray:
    """The picture that a tower saw: [3, H, W] as transformed -> uint8 [H, W, 3].

    Args:
        preprocess: the tower's ``preprocess_cfg``, whose mean and std are undone.
    """
    mean, std = (np.asarray(preprocess[name], np.float32) for name in ("mean", "std"))
    pixels = image.float().cpu().numpy().transpose(1, 2, 0) * std + mean
    return (pixels.clip(0, 1) * 255).round().astype(np.uint8)


def blank(size: tuple[float, float]) -> np.ndarray:
    """A light canvas uint8 [H, W, 3] of the aspect of ``size`` (width, height)."""
    scale = _CANVAS / max(size)
    return np.full((max(1, round(size[1] * scale)), max(1, round(size[0] * scale)), 3), 235, np.uint8)


def brightness(values: np.ndarray, boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    """Values [L] as an image [height, width] in [0, 1]: the greatest of the regions that cover a pixel, least to greatest;
    0 where none does.

    Args:
        values: any finite. boxes: [L, 4], fractions.
    """
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / (high - low) if high > low else np.ones_like(values)
    out = np.zeros((height, width), np.float32)
    edges = np.round(boxes * [width, height, width, height]).astype(int).clip(0)
    for value, (left, top, right, bottom) in zip(scaled, edges, strict=True):
        covered = out[top : max(bottom, top + 1), left : max(right, left + 1)]
        np.maximum(covered, value, out=covered)
    return out
