"""Grids of towers, boxes, brightness and the picture under them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from coder_plugin import create_model
from coder_plugin.data.regions.base import grid_boxes
from coder_plugin.errors import CoderError
from coder_plugin.report.alignment import grid_of, tower_picture

TEXT = {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
TOWERS = {  # image size (height, width), its configuration, its grid
    "vit": ((32, 64), {"patch_size": 16, "layers": 1, "width": 32, "head_width": 16}, (2, 4)),
    "tall-vit": ((96, 32), {"patch_size": 16, "layers": 1, "width": 32, "head_width": 16}, (6, 2)),
    "timm-vit": ((64, 96), {"timm_model_name": "test_vit", "timm_pool": "avg", "timm_proj": "linear"}, (4, 6)),
    "timm-conv": ((64, 160), {"timm_model_name": "test_resnet", "timm_pool": "avg", "timm_proj": "linear"}, (2, 5)),
    "resnet": (64, {"layers": [1, 1, 1, 1], "width": 16, "head_width": 64}, (2, 2)),
}


@pytest.mark.parametrize("kind", TOWERS)
def test_cells_lie_where_the_tower_saw_them(kind: str, tmp_path) -> None:
    """The grid is known, and a bright spot in a cell of the picture moves the features of the cell that is drawn there most."""
    size, vision, grid = TOWERS[kind]
    path = tmp_path / f"places-{kind}.json"
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": {"image_size": 64, **vision}, "text_cfg": TEXT}))
    torch.manual_seed(0)
    keys = {"image_locals", "image_mask"}
    model = create_model(str(path), loss="dcl", return_intermediates=keys, force_image_size=size).eval()
    height, width = size if isinstance(size, tuple) else (size, size)
    dark = torch.zeros(1, 3, height, width)
    with torch.no_grad():
        before = model.describe_image(dark)["image_locals"][0]
        assert grid_of(model, len(before)) == grid
        boxes = grid_boxes(*grid)
        for cell in (0, grid[1] - 1, len(before) - 1):
            left, top, right, bottom = (boxes[cell] * [width, height, width, height]).astype(int)
            spot = dark.clone()
            spot[..., top + 2 : bottom - 2, left + 2 : right - 2] = 3
            moved = (model.describe_image(spot)["image_locals"][0] - before).norm(dim=1)
            assert int(moved.argmax()) == cell, (kind, cell)


def test_features_that_fill_no_grid_are_refused() -> None:
    with pytest.raises(CoderError, match="37 features of a picture of 224 x 224"):
        grid_of(SimpleNamespace(visual=SimpleNamespace(image_size=224, grid_size=(6, 6))), 37)


def test_the_picture_is_what_went_in() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    image = torch.from_numpy((pixels / 255 - mean) / std).permute(2, 0, 1)
    np.testing.assert_array_equal(tower_picture(image, {"mean": mean, "std": std}), pixels)
