"""Images held out from training."""

from __future__ import annotations

from typing import Any

import pytest

from coder_plugin import Trainer
from coder_plugin.config import DataConfig
from coder_plugin.data.from_config import make_source
from coder_plugin.data.held_aside import split_aside
from coder_plugin.data.item import Item
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.open import saved_data_config
from coder_plugin.pretrained.options import resolve_config


def source(count: int, same: int = 1, **options: Any) -> ItemSource:
    return ItemSource([Item(f"{n // same}.jpg", ("a dog",) * (1 + n % 3), lambda: None) for n in range(count)], **options)


def keys(part: Any) -> list[str]:
    return [item.key for _, item in part.items()]


def test_each_image_is_in_one_part_and_the_draw_is_at_random() -> None:
    rest, aside = split_aside(source(100), 20)
    assert len(keys(aside)) == 20 and sorted(keys(rest) + keys(aside)) == sorted(keys(source(100)))
    numbers = [int(key[:-4]) for key in keys(aside)]
    assert numbers == sorted(numbers) and numbers[0] < 20 and numbers[-1] >= 80, "in the data's order, from all of them"
    assert keys(split_aside(source(100), 20, seed=1)[1]) != keys(aside) == keys(split_aside(source(100), 20)[1])
    counts = source(100).caption_counts
    assert aside.caption_counts == [counts[number] for number in numbers] and aside.samples("all") == sum(aside.caption_counts)
    assert rest.groups == [80] and rest.digest() != aside.digest() != source(100).digest()


def test_rows_of_one_image_stay_together() -> None:
    rest, aside = split_aside(source(90, same=3), 10)
    assert len(set(keys(aside))) == 10 and len(keys(aside)) == 30 and not set(keys(rest)) & set(keys(aside))


def test_groups_are_those_of_the_images_that_are_left() -> None:
    class Shards(ItemSource):
        groups = [6, 0, 6]

    items = [source(12).item(number) for number in range(12)]
    rest, aside = split_aside(Shards(items), 4)
    expected = [sum(int(key[:-4]) < 6 for key in keys(rest)), sum(int(key[:-4]) >= 6 for key in keys(rest))]
    assert rest.groups == [count for count in expected if count] and sum(aside.groups) == 4


def test_half_of_the_images_is_the_most() -> None:
    assert keys(split_aside(source(10), 5)[1])
    with pytest.raises(CoderError, match="--hold-aside 6: items has 10 images: hold aside at most 5"):
        split_aside(source(10), 6)


def test_training_and_validation_read_the_two_parts(tmp_path: Any, tiny_model: str) -> None:
    options = {"hold_aside": 40, "train_num_samples": 32, "batch_size": 16, "epochs": 1, "workers": 0, "logs": str(tmp_path)}
    options |= {"model": tiny_model, "dataset_type": "scenes"}
    trainer = Trainer.from_config(resolve_config({**options, "name": "run"}))
    assert trainer.val.num_images == 40 and not set(keys(trainer.val)) & set(keys(trainer.loader.source))
    trainer.run()
    assert trainer.last["images"] == 40
    again = make_source(saved_data_config(tmp_path / "run", {}), split="val")
    assert keys(again) == keys(trainer.val), "eval RUN measures the same images"
    assert saved_data_config(tmp_path / "run", {"val_data": "other.csv"}).hold_aside == 0


def test_named_validation_data_stay_whole() -> None:
    config = DataConfig(train="scenes", val="scenes", dataset_type="scenes", hold_aside=10)
    assert make_source(config, split="val").num_images == make_source(DataConfig(), split="val").num_images


def test_objects_are_refused() -> None:
    with pytest.raises(CoderError, match="hold_aside draws images of data that are named"):
        Trainer(model="coder-tiny", loss="dcl", train=source(8), config={"hold_aside": 2})
