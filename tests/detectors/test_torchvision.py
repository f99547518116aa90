"""Regions of torchvision's Faster-RCNNs, against its own detections and its own modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import get_model

from coder_plugin.detectors.torchvision_ import TorchVision
from coder_plugin.errors import CoderError

MODEL = "fasterrcnn_mobilenet_v3_large_320_fpn"


def picture(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


PICTURES = [picture(90, 60), picture(50, 80)]


def detector(**options) -> TorchVision:
    return TorchVision(**{"model": MODEL, "allow_random": True, **options})


@pytest.fixture(scope="module")
def random():
    """Random heads, wide enough for scores and boxes that differ."""
    made = detector()
    generator = torch.Generator().manual_seed(3)
    made.model.roi_heads.box_head.fc6.weight.mul_(1e2)  # random towers give all regions nearly the same features
    predictor = made.model.roi_heads.box_predictor
    predictor.cls_score.weight.copy_(torch.randn(predictor.cls_score.weight.shape, generator=generator) * 0.5)
    predictor.bbox_pred.weight.copy_(torch.randn(predictor.bbox_pred.weight.shape, generator=generator) * 0.05)
    return made


@pytest.fixture(scope="module")
def results(random):
    return random(PICTURES)


def test_what_a_picture_gives(results):
    for image, regions in zip(PICTURES, results, strict=True):
        assert regions.features.shape == (36, 1024) and regions.features.dtype == np.float32
        assert regions.boxes.dtype == np.float32 and regions.size == image.size
        assert (regions.boxes >= 0).all() and (regions.boxes <= np.array([*image.size] * 2) + 1e-3).all()
        conf = regions.extras["objects_conf"]
        assert (np.diff(conf) <= 0).all() and conf[0] > conf[-1]
        assert regions.extras["objects_id"].dtype == np.int64 and (regions.extras["objects_id"] < 90).all()


def test_every_region_is_one_of_torchvisions_own_detections(random, results):
    heads = random.model.roi_heads
    heads.score_thresh, heads.nms_thresh, heads.detections_per_img = 0.0, 0.3, 100_000
    tensors = [torch.from_numpy(np.array(each)).permute(2, 0, 1) / 255 for each in PICTURES]
    with torch.inference_mode():
        own = random.model(tensors)
    for regions, found in zip(results, own, strict=True):
        rows = torch.cat([found["boxes"], found["labels"][:, None] - 1, found["scores"][:, None]], 1)
        ours = torch.cat(
            [
                torch.from_numpy(regions.boxes),
                torch.from_numpy(regions.extras["objects_id"])[:, None],
                torch.from_numpy(regions.extras["objects_conf"])[:, None],
            ],
            1,
        )
        torch.testing.assert_close(ours[0, 5], rows[0, 5], rtol=1e-3, atol=0)  # several may have the best score
        distance = (ours[:, None] - rows[None]).abs().amax(-1).amin(1)
        large = ((ours[:, 2:4] - ours[:, :2]) > 0.5).all(1)  # torchvision drops boxes of no width
        assert large.sum() > 10 and (distance[large] < 1e-2).all()


def test_features_are_the_box_heads(random, results):
    seen = []
    hook = random.model.roi_heads.box_head.register_forward_hook(lambda module, given, out: seen.append(out))
    random(PICTURES[:1])
    hook.remove()
    rows = seen[0].numpy()
    single = random(PICTURES[:1])[0].features
    for row in single[:5]:
        assert (np.abs(rows - row).max(1) < 1e-4).any()


def test_weights_of_another_number_of_classes(tmp_path):
    torch.manual_seed(7)
    model = get_model(MODEL, weights=None, weights_backbone=None, num_classes=5)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    made = TorchVision(model=MODEL, weights=str(tmp_path / "weights.pth"), regions=9)
    regions = made(PICTURES[:1])[0]
    assert len(regions) == 9 and regions.extras["objects_id"].max() < 4
    model.eval()
    assert torch.equal(made.model.roi_heads.box_head.fc6.weight, model.roi_heads.box_head.fc6.weight)


def test_another_models_weights_are_refused(tmp_path):
    torch.save({"roi_heads.other": torch.zeros(1)}, tmp_path / "weights.pth")
    with pytest.raises(CoderError, match=r"missing \(.*unknown \(roi_heads.other\)"):
        detector(weights=str(tmp_path / "weights.pth"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model": "retinanet_resnet50_fpn"}, "fasterrcnn_resnet50_fpn_v2"),
        ({"allow_random": False}, "--weights default"),
        ({"regions": 0}, "--regions is 0"),
    ],
)
def test_bad_options(options, told):
    with pytest.raises(CoderError) as caught:
        detector(**options)
    assert told in str(caught.value)
