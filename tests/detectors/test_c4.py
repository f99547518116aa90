"""The C4 detector: its shape and arithmetic are bottom-up-attention's, and so are its names understood."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import roi_pool

from coder_plugin.detectors.c4 import C4, Network, anchors
from coder_plugin.detectors.c4_names import translate_names
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


def test_strides_and_dilation():
    net = Network(classes=3, attributes=0, proposals=5)
    assert net.trunk.layer3[0].conv1.stride == (2, 2) and net.trunk.layer3[0].conv2.stride == (1, 1)
    assert [block.conv2.dilation for block in net.res5] == [(2, 2)] * 3
    assert len(net.trunk.layer3) == 23


def test_anchors_are_py_faster_rcnns():
    inclusive = (anchors() - torch.tensor([0, 0, 1, 1])).tolist()
    known = [[-84, -40, 99, 55], [-176, -88, 191, 103], [-56, -56, 71, 71], [-248, -248, 263, 263], [-36, -80, 51, 95]]
    assert len(inclusive) == 12 and all(box in inclusive for box in known)
    # proportion by proportion, the scales of one in a row
    assert [box[2] - box[0] + 1 for box in inclusive[:4]] == [92, 184, 368, 736]


def detectron_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our names as bottom-up-attention.pytorch's modules would have them."""
    theirs = {"pixel_mean": torch.zeros(3), "roi_heads.box_predictor.bbox_pred.weight": torch.zeros(4, 2048)}
    for name, value in state.items():
        name = re.sub(r"^trunk\.conv1\.", "backbone.stem.conv1.", name)
        name = re.sub(r"^trunk\.bn1\.", "backbone.stem.conv1.norm.", name)
        name = re.sub(r"^trunk\.layer(\d)", lambda found: f"backbone.res{int(found[1]) + 1}", name)
        name = re.sub(r"^res5\.", "roi_heads.res5.", name)
        name = re.sub(r"\.bn(\d)\.", r".conv\1.norm.", name)
        name = name.replace(".downsample.0.", ".shortcut.").replace(".downsample.1.", ".shortcut.norm.")
        name = name.replace("rpn.head.conv.0.0", "proposal_generator.rpn_head.conv")
        name = name.replace("rpn.head.bbox_pred", "proposal_generator.rpn_head.anchor_deltas")
        name = re.sub(r"^(cls_|attr_)", r"roi_heads.box_predictor.\1", name)
        if name.startswith("rpn.head.cls_logits"):
            name = name.replace("rpn.head.cls_logits", "proposal_generator.rpn_head.objectness_logits")
            value = torch.cat([torch.full_like(value, 0.25), value + 0.25])  # background and foreground
        theirs[name] = value
    return theirs


def test_a_checkpoint_under_detectrons_names_gives_the_same_regions_and_attributes(tmp_path):
    torch.manual_seed(0)
    state = Network(classes=12, attributes=6, proposals=8).state_dict()
    theirs = detectron_names(state)
    assert "backbone.res2.0.conv1.norm.weight" in theirs and "roi_heads.res5.0.shortcut.norm.bias" in theirs
    torch.save(state, tmp_path / "ours.pth")
    torch.save(theirs, tmp_path / "theirs.pth")
    ours, same = (C4(weights=str(tmp_path / f"{name}.pth"), **SMALL) for name in ("ours", "theirs"))
    a, b = ours(PICTURES[:1])[0], same(PICTURES[:1])[0]
    np.testing.assert_allclose(a.features, b.features, rtol=1e-5)
    np.testing.assert_allclose(a.boxes, b.boxes, atol=1e-3)
    assert a.extras["attrs_id"].max() < 5 and a.extras["objects_id"].max() < 11
    np.testing.assert_array_equal(a.extras["attrs_id"], b.extras["attrs_id"])


def test_objectness_is_the_difference_of_foreground_and_background():
    logits = torch.randn(24)
    ours = translate_names({"proposal_generator.rpn_head.objectness_logits.bias": logits})["rpn.head.cls_logits.bias"]
    expected = torch.stack([logits[:12], logits[12:]]).softmax(0)[1]
    torch.testing.assert_close(ours.sigmoid(), expected)


def test_bad_options(tmp_path):
    with pytest.raises(CoderError, match="--allow-random"):
        C4()
    torch.save({"cls_score.weight": torch.zeros(5, 2048)}, tmp_path / "part.pth")
    with pytest.raises(CoderError, match="missing"):
        C4(weights=str(tmp_path / "part.pth"))
