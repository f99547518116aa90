"""Grid features: cells, boxes, preprocessing and weights of timm's models."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file

from coder_plugin.detectors.global_features import WithGlobal
from coder_plugin.detectors.timm_ import Timm, Trunk
from coder_plugin.errors import CoderError

RESNET = "test_resnet.r160_in1k"


def picture(width: int = 50, height: int = 40) -> Image.Image:
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def grid(model: str = RESNET, **options) -> Timm:
    return Timm(**{"model": model, "allow_random": True, **options})


def by_hand(detector: Timm, image: Image.Image, side: int, mean, std) -> torch.Tensor:
    method = Image.Resampling[detector.trunk.model.pretrained_cfg["interpolation"].upper()]
    data = np.asarray(image.resize((side, side), method), np.float64) / 255
    tensor = torch.from_numpy(((data - mean) / std).transpose(2, 0, 1)).float()
    with torch.inference_mode():
        return detector.trunk.model.forward_features(tensor[None])[0]


def test_cells_are_the_final_map_from_the_top_left_to_right():
    detector = grid(image_size=96)
    config = detector.trunk.model.pretrained_cfg
    image = picture()
    expected = by_hand(detector, image, 96, config["mean"], config["std"])
    regions = detector([image])[0]
    rows, columns = expected.shape[1:]
    assert (len(regions), detector.width) == (rows * columns, len(expected))
    torch.testing.assert_close(
        torch.from_numpy(regions.features).reshape(rows, columns, -1), expected.permute(1, 2, 0), rtol=1e-4, atol=1e-4
    )
    assert regions.features.dtype == np.float32 and regions.size == (50, 40)


def test_grid_pools_the_map():
    images = [picture(), picture(33)]
    whole, pooled = grid(image_size=160)(images), grid(image_size=160, grid=2)(images)
    side = int(len(whole[0]) ** 0.5)
    for a, b in zip(whole, pooled, strict=True):
        cells = torch.from_numpy(a.features).T.unflatten(1, (side, side))
        expected = F.adaptive_avg_pool2d(cells, 2).flatten(1).T
        torch.testing.assert_close(torch.from_numpy(b.features), expected, rtol=1e-5, atol=1e-5)
    assert pooled[0].boxes.tolist() == [[0, 0, 25, 20], [25, 0, 50, 20], [0, 20, 25, 40], [25, 20, 50, 40]]


def test_the_effect_of_a_corner_is_in_its_cell():
    detector = grid(image_size=160)
    black = Image.new("RGB", (160, 160))
    corner = black.copy()
    corner.paste((255, 255, 255), (150, 0, 160, 10))
    change = np.abs(detector([corner])[0].features - detector([black])[0].features).sum(1)
    box = detector([black])[0].boxes[change.argmax()]
    assert box[2] == 160 and box[1] == 0


def test_a_transformers_tokens_without_its_prefix():
    detector = grid("test_vit.r160_in1k", image_size=96)
    prepared = [detector.preprocess(picture())]
    with torch.inference_mode():
        tokens = detector.trunk.tokens(prepared)[0]
    prefix = detector.trunk.model.num_prefix_tokens
    assert prefix > 0
    np.testing.assert_array_equal(detector.detect(prepared)[0].features, tokens[prefix:].numpy())


def test_weights_by_name_by_order_and_without_a_classifier(tmp_path):
    model = timm.create_model(RESNET)
    torch.manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    state = model.state_dict()
    save_file(state, tmp_path / "named.safetensors")
    torch.save({f"other.{name}": value for name, value in state.items()}, tmp_path / "ordered.pth")
    rest = {name: value for name, value in state.items() if not name.startswith(model.pretrained_cfg["classifier"])}
    torch.save({"state_dict": rest}, tmp_path / "headless.pth")
    results = [
        Timm(model=RESNET, weights=str(tmp_path / name), image_size=64)([picture()])[0].features
        for name in ("named.safetensors", "ordered.pth", "headless.pth")
    ]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    assert not np.array_equal(results[0], grid(image_size=64)([picture()])[0].features)


def test_random_weights_are_the_same_ones_and_leave_the_generator_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = grid(image_size=64)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert first.checksum() == grid(image_size=64).checksum()


def test_a_whole_image_feature_beside_the_regions():
    trunk = Trunk("test_efficientnet.r160_in1k", allow_random=True)
    plain = grid(image_size=64)
    detector = WithGlobal(plain, trunk)
    images = [picture(), picture(70)]
    results = detector(images)
    for number, image in enumerate(images):
        np.testing.assert_allclose(results[number].features, plain([image])[0].features, rtol=1e-4, atol=1e-5)
        expected = trunk.pooled([trunk.preprocess(image)])[0]
        np.testing.assert_allclose(results[number].global_feature, expected, rtol=1e-4, atol=1e-5)
    assert detector.width == plain.width and detector.checksum() not in (plain.checksum(), "")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model": None}, "needs a model"),
        ({"model": "no_such_model"}, "'no_such_model' cannot be built"),
        ({"allow_random": False}, "--allow-random"),
        ({"grid": 0}, "--grid is 0"),
        ({"image_mean": [0.5]}, "--image-mean has 1 numbers"),
        ({"device": "nowhere"}, "'nowhere'"),
        ({"weights": "missing.pth"}, "no such file"),
    ],
)
def test_bad_options(options, told):
    with pytest.raises(CoderError) as caught:
        grid(**options)
    assert told in str(caught.value)
