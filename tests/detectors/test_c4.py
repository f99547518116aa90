"""The C4 detector: its shape and arithmetic are bottom-up-attention's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import roi_pool

from coder_plugin.detectors.c4 import C4, anchors
from coder_plugin.errors import CoderError

SMALL = {"image_size": 64, "max_size": 100, "proposals": 8}


def picture(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


PICTURES = [picture(90, 60), picture(50, 80)]


@pytest.fixture(scope="module")
def small():
    return C4(allow_random=True, **SMALL)


@pytest.fixture(scope="module")
def results(small):
    return small(PICTURES)


def test_what_a_picture_gives(results):
    for image, regions in zip(PICTURES, results, strict=True):
        assert regions.features.shape[1] == 2048 and 1 <= len(regions) <= 8 and regions.size == image.size
        assert (regions.boxes >= 0).all() and (regions.boxes <= np.array([*image.size] * 2) + 1e-3).all()
        assert (np.diff(regions.extras["objects_conf"]) <= 0).all()
        assert set(regions.extras) == {"objects_id", "objects_conf"}


def test_features_are_the_mean_of_res5_on_the_pooled_box(small, results):
    image, regions = PICTURES[0], results[0]
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).flip(0).float()
    with torch.inference_mode():
        resized, _ = small.transform([tensor])
        assert resized.image_sizes == [(64, 96)]
        # as in the batch, where both pictures are filled up to one size
        padded = torch.zeros(1, 3, 128, 96)
        padded[:, :, :64, :96] = resized.tensors[:, :, :64, :96]
        maps = small.model.trunk(padded)
        assert maps.shape == (1, 1024, 8, 6)
        boxes = torch.from_numpy(regions.boxes) * torch.tensor([96 / 90, 64 / 60] * 2)
        blocks = small.model.res5(roi_pool(maps, [boxes], 14, 1 / 16))
    assert blocks.shape[2:] == (14, 14)
    close = np.isclose(blocks.mean((2, 3)).numpy(), regions.features, rtol=1e-3, atol=1e-3).all(1)
    assert close.mean() > 0.7  # rounding may move a corner to the next cell


def test_pixels_are_blue_green_red_less_their_means(small):
    image = Image.new("RGB", (100, 64), (200, 100, 50))
    seen = []
    hook = small.model.trunk.conv1.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    small([image])
    hook.remove()
    expected = [50 - 102.9801, 100 - 115.9465, 200 - 122.7717]
    assert seen[0][0, :, 5, 5].tolist() == pytest.approx(expected, abs=1e-3)


def test_anchors_are_py_faster_rcnns():
    inclusive = (anchors() - torch.tensor([0, 0, 1, 1])).tolist()
    known = [[-84, -40, 99, 55], [-176, -88, 191, 103], [-56, -56, 71, 71], [-248, -248, 263, 263], [-36, -80, 51, 95]]
    assert len(inclusive) == 12 and all(box in inclusive for box in known)
    # proportion by proportion, the scales of one in a row
    assert [box[2] - box[0] + 1 for box in inclusive[:4]] == [92, 184, 368, 736]


def test_bad_options(tmp_path):
    with pytest.raises(CoderError, match="--allow-random"):
        C4()
    torch.save({"cls_score.weight": torch.zeros(5, 2048)}, tmp_path / "part.pth")
    with pytest.raises(CoderError, match="missing"):
        C4(weights=str(tmp_path / "part.pth"))
