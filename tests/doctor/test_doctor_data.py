"""Faults that are planted in shards: exactly the finding that each calls for, with its advice; clean data give none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coder_plugin.data.item import Item
from coder_plugin.doctor import data as module
from coder_plugin.doctor.data import look_at
from tests.doctor import made
from tests.doctor.made import amiss, encoded, examine, picture, sample


def plant(folder: Path, **planted: Any) -> dict[str, Any]:
    """The doctor's word on training data with these samples, beside clean validation data."""
    train, val = made.write_split(folder, "train", 0, **planted), made.write_split(folder, "val", 500)
    found = examine(train_data=train, val_data=val)
    if any(each.name.startswith("leak.pictures") for each in amiss(found).values()):
        assert not any(each.name == "leak.pictures" and each.level == "ok" for each in found), "no leak is said"
    return amiss(found)


def test_clean_data_give_no_finding(tmp_path: Path) -> None:
    found = examine(train_data=made.write_split(tmp_path, "train", 0), val_data=made.write_split(tmp_path, "val", 500))
    assert amiss(found) == {}
    told = {each.name: each.text for each in found}
    assert told["train.captions"].endswith("train-{0..1}.tar: 12 images, 24 captions, 2 per image")
    assert told["train.pictures"] == "12 of 12 pictures decoded"
    assert (
        told["leak.pictures"] == "no picture occurs in both splits; compared: 12 of 12 train and 12 of 12 val pictures"
    )
    assert {"train.ids", "val.ids", "leak.ids"} <= told.keys()


def about(number: int, **fields: Any) -> dict[str, Any]:
    return {"image_id": f"image {number}", "captions": made.captions(number), **fields}


JPEG = encoded(picture(7000))
FAULTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "cut in the middle": ({"jpg": JPEG[: len(JPEG) // 2]}, {"train.pictures.unreadable": "truncated"}),
    "no picture": ({"jpg": b"<html>not found</html>"}, {"train.pictures.unreadable": "not an image"}),
    "no file of a picture": ({"jpg": None}, {"train.pictures.unreadable": "no field"}),
    "a script in a caption": (
        {"json": about(7000, captions=["<script>alert(1)</script> dog"] * 2)},
        {"train.captions.twice": "'image 7000'"},
    ),
    "blank": ({"jpg": encoded(Image.new("RGB", (90, 90), (9, 8, 7)))}, {"train.pictures.blank": "'image 7000'"}),
    "no captions": ({"json": {"image_id": 1}}, {"train.samples.refused": "has no captions"}),
    "no json": ({"json": None, "txt": b"\xff\xfe caption"}, {"train.samples.refused": "not UTF-8"}),
    "empty caption": ({"json": about(1, captions=["x y", " "])}, {"train.samples.refused": "empty caption"}),
    "twice": ({"json": about(7000, captions=["A dog  runs", "a dog runs"])}, {"train.captions.twice": "'image 7000'"}),
    "another's": (
        {"json": about(7000, captions=made.captions(3))},
        {"train.captions.shared": "'image 3', 'image 7000'"},
    ),
    "id taken": ({"json": about(3, captions=["another dog"])}, {"train.ids.clash": "'image 3'"}),
    "id of val": ({"json": about(503, captions=["another dog"])}, {"leak.ids.shared": "'image 503'"}),
    "captions of val": (
        {"json": about(7000, captions=made.captions(503))},
        {"leak.captions": "'image 7000' = 'image 503'"},
    ),
    "picture twice": ({"jpg": sample(3)["jpg"]}, {"train.pictures.twice": "'image 3' = 'image 7000'"}),
    "picture of val": ({"jpg": sample(503)["jpg"]}, {"leak.pictures": "'image 7000' = 'image 503'"}),
    "copy": ({"jpg": encoded(picture(3), quality=40)}, {"train.pictures.alike": "'image 3' = 'image 7000'"}),
    "copy of val": ({"jpg": encoded(picture(503), quality=40)}, {"leak.pictures.alike": "'image 7000' = 'image 503'"}),
    "smaller copy of val": (
        {"jpg": encoded(picture(503).resize((64, 48)))},
        {"leak.pictures.alike": "1 validation picture almost the same as one in training: 'image 7000' = 'image 503'"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(tmp_path: Path, fault: str) -> None:
    fields, expected = FAULTS[fault]
    found = plant(tmp_path, x7000=sample(7000, **fields))
    assert found.keys() == expected.keys(), found
    for name, text in expected.items():
        assert text in found[name].text


def test_an_image_of_both_splits_under_one_id(tmp_path: Path) -> None:
    found = plant(tmp_path, x1=sample(503))
    assert found.keys() == {"leak.ids", "leak.captions", "leak.pictures"}
    assert found["leak.ids"].level == "problem" and "leave these images out" in found["leak.ids"].do


def test_a_shard_that_stops_in_the_middle(tmp_path: Path) -> None:
    train = made.write_split(tmp_path, "train", 0)
    path = tmp_path / "train-1.tar"
    path.write_bytes(path.read_bytes()[:12_000])
    found = examine(train_data=train)
    wrong = amiss(found)
    assert list(wrong) == ["train.broken"] and wrong["train.broken"].level == "problem"
    assert str(path) in wrong["train.broken"].text and "train-0" not in wrong["train.broken"].text


def test_many_unreadable_pictures_are_a_problem(tmp_path: Path) -> None:
    train = made.write_split(tmp_path, "train", 0, a=sample(50, jpg=b"x"), b=sample(51, jpg=b"y"))
    levels = [
        amiss(examine(train_data=train, max_bad_samples=most))["train.pictures.unreadable"].level for most in (0.001, 0.002)
    ]
    assert levels == ["problem", "warning"]


def test_captions_beyond_the_context_are_cut(tmp_path: Path, tiny_model: str) -> None:
    """The tiny model has 40 tokens: 38 words fit."""
    texts = [" ".join(["dog"] * count) for count in (37, 38, 39, 60)]
    train = made.write_split(tmp_path, "train", 0, x=sample(7000, json=about(7000, captions=texts)))
    found = amiss(examine(train_data=train, model=tiny_model, loss="triplet", batch_size=4))
    assert list(found) == ["train.captions.long"] and found["train.captions.long"].level == "warning"
    # one that just fills it counts too: it cannot be told from one that is cut
    assert "3 of 28" in found["train.captions.long"].text and "40 tokens" in found["train.captions.long"].text


def test_uneven_validation_captions(tmp_path: Path) -> None:
    val = made.write_split(tmp_path, "val", 0, x=sample(7000, json=about(7000, captions=["a dog here"])))
    assert list(amiss(examine(val_data=val))) == ["val.captions.uneven"]


def test_only_a_sample_of_large_data_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 10)
    train, val = made.write_split(tmp_path, "train", 0, count=40), made.write_split(tmp_path, "val", 500, count=8)
    flags = {"train_data": train, "val_data": val}
    found = examine(samples=5, **flags)
    assert list(amiss(found)) == ["leak.pictures.partial"]
    assert "5 of 40 train and 8 of 8 val" in amiss(found)["leak.pictures.partial"].text
    assert amiss(examine(samples=5, whole=True, **flags)) == {}
    monkeypatch.setattr(module, "MOST", 20)
    assert amiss(examine(samples=50, **flags)).keys() == {"train.partial"}
    assert amiss(examine(whole=True, **flags)) == {}


def test_nothing_is_fetched_and_no_command_is_run(tmp_path: Path) -> None:
    local = made.write_split(tmp_path, "train", 0).replace("{0..1}", "0")
    for train in (f"{local}::https://example.org/more-0.tar", f"pipe:touch {tmp_path}/ran; cat {local}", "s3://a/{0..1}.tar"):
        assert list(amiss(examine(train_data=train))) == ["train.remote"]
    assert not (tmp_path / "ran").exists()


def test_other_readers_speak_for_themselves(tmp_path: Path) -> None:
    """Tables are read whole when they are opened; faulty rows are bad samples, and faulty tables are refused."""
    for number in range(3):
        picture(number).save(tmp_path / f"{number}.jpg")
    rows = [f"{number}.jpg\ta dog {number}" for number in range(3)]
    table = tmp_path / "pairs.csv"
    table.write_text("\n".join(["filepath\ttitle", *rows]))
    assert amiss(examine(train_data=str(table))) == {}
    table.write_text("\n".join(["filepath\ttitle", *rows, "3.jpg\t "]))
    found = amiss(examine(train_data=str(table)))
    assert list(found) == ["train.samples.refused"] and "line 5" in found["train.samples.refused"].text
    table.write_text("\n".join(["filepath\ttitle", *rows, "gone.jpg\ta cat here"]))
    found = amiss(examine(train_data=str(table)))
    assert list(found) == ["train.pictures.unreadable"] and "gone.jpg" in found["train.pictures.unreadable"].text
    karpathy = tmp_path / "dataset.json"
    karpathy.write_text(json.dumps({"images": [{"filename": "0.jpg", "split": "train", "sentences": []}]}))
    found = amiss(examine(train_data=str(karpathy), image_root=str(tmp_path)))
    assert "has no captions" in found["train.refused"].text  # no other image is left
    assert list(amiss(examine(train_data=str(tmp_path / "absent.csv")))) == ["train.refused"]
    table.write_text("filepath\ttitle\ngone.jpg\ta cat here")
    found = examine(train_data=str(table), val_data=str(table))
    assert "--image-root" in amiss(found)["train.pictures.unreadable"].do
    assert not any(each.name == "leak.pictures" for each in found), "nothing was compared"


def look(key: str, image: Image.Image) -> module.Look:
    return look_at(Item(key, ("x",), lambda: image))


def named(pairs: list[tuple[module.Look, module.Look]]) -> list[tuple[str, str]]:
    return [(a.key, b.key) for a, b in pairs]


def test_pictures_that_are_no_copies() -> None:
    ours = [look("a", picture(1)), look("b", picture(2)), look("d", picture(3))]
    brighter = look("e", Image.eval(picture(2), lambda value: min(255, value + 4)))
    assert named(module._copies(ours, [brighter])) == [("b", "e")] and module._copies([], ours) == []
    shapes = [Image.new("RGB", (96, 96), "white") for _ in range(2)]
    shapes[0].paste("black", (14, 14, 24, 24))
    shapes[1].paste("red", (14, 62, 24, 72))
    assert module._copies([look("g", shapes[0])], [look("h", shapes[1])]) == [], "much alike but for what is in them"
    half = look("k", Image.blend(picture(1), picture(2), 0.5))
    assert 0.3 < float(half.small @ ours[1].small) < 0.97
    assert module._copies([dataclasses.replace(half, bits=ours[1].bits)], [ours[1]]) == [], "equal hashes are not enough"
    assert not look("i", Image.new("RGB", (9, 9), "red")).small.any() and look("j", picture(1)).small.any()
