"""8-bit training pictures: the float transform's values, once normalised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from coder_plugin import Trainer
from coder_plugin.data import open_source, to_device
from coder_plugin.data.loader import TrainLoader
from coder_plugin.data.pixels import EightBit, eight_bit
from coder_plugin.data.source import isolated_rng
from coder_plugin.errors import CoderError


def picture(seed: int = 0, width: int = 60, height: int = 45) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def transform_of(**augmentation: Any) -> Any:
    return image_transform_v2(PreprocessCfg(size=32), is_train=True, aug_cfg=augmentation or None)


JITTER = {"color_jitter": (0.3, 0.3, 0.3, 0.1), "color_jitter_prob": 0.8, "gray_scale_prob": 0.5}


@pytest.mark.parametrize("augmentation", [{}, JITTER, {"use_timm": True}], ids=["plain", "jitter", "timm"])
def test_normalized_batches_equal_the_float_transform_bit_for_bit(augmentation):
    transform = transform_of(**augmentation)
    pixels = eight_bit(transform)
    assert isinstance(pixels, EightBit)
    expected, stack = [], []
    for seed in range(12):
        for made, target in ((transform, expected), (pixels, stack)):
            with isolated_rng(seed):
                target.append(made(picture(seed)))
    batch = torch.stack(stack)
    assert batch.dtype == torch.uint8 and batch.shape == (12, 3, 32, 32)
    found = pixels.normalize(batch)
    assert found.is_contiguous() and torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize(
    "transform",
    [
        transform_of(use_timm=True, re_prob=1.0),  # erases after it has normalised
        image_transform_v2(PreprocessCfg(size=32), is_train=True).transforms[0],
        lambda image: image,
    ],
    ids=["random erasing", "no normalisation", "a function"],
)
def test_other_transforms_stay_as_they_are(transform):
    assert eight_bit(transform) is transform


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_gives_8_bit_batches_with_the_rows_of_the_float_transform(workers):
    source = open_source("scenes", count=9)

    def batches(transform: Any) -> list[torch.Tensor]:
        made = TrainLoader(
            source, batch_size=4, transform=transform, tokenizer=lambda texts: torch.zeros(len(texts), 1), workers=workers
        )
        return [batch["image"] for batch in made.epoch(0)]

    transform = transform_of(**JITTER)
    pixels = eight_bit(transform)
    for ours, theirs in zip(batches(pixels), batches(transform), strict=True):
        assert ours.dtype == torch.uint8 and ours.shape == (4, 3, 32, 32)
        assert torch.equal(pixels.normalize(ours), theirs)


def test_a_batch_is_moved_with_all_its_tensors_and_normalised():
    pixels = eight_bit(transform_of(**JITTER))
    image = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    regions = {"features": torch.ones(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)}
    batch: dict[str, Any] = {"image": image, "image_id": torch.arange(2), "captions": [("a",), ("b",)]}
    moved = to_device(batch, "meta", lambda picture: picture)  # a transform whose 8-bit pictures are meant
    assert moved["image"].dtype == torch.uint8 and moved["image"].device.type == moved["image_id"].device.type == "meta"
    assert moved["captions"] == [("a",), ("b",)] and batch["image"] is image
    assert torch.equal(to_device(batch, torch.device("cpu"), pixels)["image"], pixels.normalize(image))
    moved = to_device({"image": regions}, "meta")["image"]
    assert {name: (each.device.type, each.shape) for name, each in moved.items()} == dict.fromkeys(regions, ("meta", (2, 3)))
    with pytest.raises(CoderError, match="pass the loader's transform"):
        to_device(batch, "cpu")


def test_the_trainer_normalises_on_the_device(tmp_path):
    options = {"epochs": 1, "batch_size": 4, "train_num_samples": 8, "workers": 0, "logs": str(tmp_path)}
    trainer = Trainer(model="coder-tiny", loss="dcl", train="scenes", config=options)
    batch = next(trainer.loader.epoch(0))
    assert batch["image"].dtype == torch.uint8
    given = trainer._to_device(dict(batch))["image"]
    float_transform = image_transform_v2(PreprocessCfg(**trainer.model.visual.preprocess_cfg), is_train=True)
    trainer.loader._make = replace(trainer.loader._make, transform=float_transform)
    assert given.dtype == torch.float32 and torch.equal(given, next(trainer.loader.epoch(0))["image"])
