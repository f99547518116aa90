"""Pairs become the model's inputs."""

from __future__ import annotations

import pytest
import torch

from coder_plugin import CoderError
from coder_plugin.data import ImageTextCollator
from coder_plugin.data.item import Item


def transform(picture: str) -> torch.Tensor:
    return torch.full((3, 2, 2), float(len(picture)))


def tokenizer(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(each), ord(each[0])] for each in captions])


def test_tuples_and_dicts_give_the_same_batch() -> None:
    pairs = [("p", "a dog", "a.jpg"), ("pic", "cat", "b.jpg"), ("p", "brown", "a.jpg")]
    batch = ImageTextCollator(transform, tokenizer)(pairs)
    rows = [{"image": image, "caption": caption, "key": key} for image, caption, key in pairs]
    others = [{"photo": image, "text": caption, "file": key, "width": 3} for image, caption, key in pairs]
    renamed = ImageTextCollator(transform, tokenizer, columns=("photo", "text", "file"))
    for same in (ImageTextCollator(transform, tokenizer)(rows), renamed(others)):
        assert same.keys() == batch.keys() and all(torch.equal(value, same[name]) for name, value in batch.items())
    assert batch["image"].shape == (3, 3, 2, 2) and batch["image"][:, 0, 0, 0].tolist() == [1, 3, 1]
    assert batch["text"].tolist() == [[5, ord("a")], [3, ord("c")], [5, ord("b")]]
    ids = [Item(key, (), lambda: None).image_id for _, _, key in pairs]  # what readers give
    assert batch["image_id"].tolist() == ids and batch["image_id"].dtype == torch.int64


def test_dicts_of_tensors_are_stacked_by_key() -> None:
    collate = ImageTextCollator(lambda regions: {"features": regions, "mask": regions > 0}, tokenizer)
    batch = collate([(torch.tensor([1.0, 0.0]), "a", 1), (torch.tensor([2.0, 3.0]), "b", 2)])
    assert batch["image"]["mask"].tolist() == [[True, False], [True, True]]


def test_a_missing_column_is_named() -> None:
    collate = ImageTextCollator(transform, tokenizer, columns=("image", "caption", "file"))
    with pytest.raises(CoderError, match=r"a pair has 'image', 'caption': .* columns=.*'file'\)\); the key"):
        collate([{"image": "p", "caption": "a"}])


@pytest.mark.parametrize(
    "pair, message",
    [
        (("p", "a dog"), r"a pair is a tuple of 2: make it \(picture, caption, key\), .*; the key is the pict"),
        ("p", "a pair is a str: make it"),
        (("p", ["a dog", "a cat"], "k"), "caption of a pair is a list, not a text: make a pair of each caption"),
        (("p", None, "k"), "caption of a pair is a NoneType, not a text: pass a str"),
    ],
)
def test_other_pairs_are_refused(pair: object, message: str) -> None:
    with pytest.raises(CoderError, match=message):
        ImageTextCollator(transform, tokenizer)([("p", "a", "k"), pair])


def test_columns_that_a_trainer_dropped_and_paths_are_named() -> None:
    with pytest.raises(CoderError, match=r"a pair has 'image' \(.*remove_unused_columns=False\)\): make it"):
        ImageTextCollator(transform, tokenizer)([{"image": "p"}])

    def decode(picture: object) -> torch.Tensor:
        raise TypeError("Unexpected type")

    with pytest.raises(CoderError, match="the transform does not read a str: open the picture .* datasets.Image"):
        ImageTextCollator(decode, tokenizer)([("a.jpg", "a dog", 1)])
    with pytest.raises(TypeError, match="Unexpected type"):
        ImageTextCollator(decode, tokenizer)([(object(), "a dog", 1)])
