"""Faults that are planted in shards: exactly the finding that each calls for, with its advice; clean data give none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from coder_plugin.doctor import images, split
from coder_plugin.doctor.captions import check_lengths
from coder_plugin.doctor.identity import copies
from tests.doctor import made
from tests.doctor.made import amiss, encoded, examine, picture, sample


def plant(folder: Path, **planted: Any) -> dict[str, Any]:
    """The doctor's word on training data with these samples, beside clean validation data."""
    train, val = made.write_split(folder, "train", 0, **planted), made.write_split(folder, "val", 500)
    return amiss(examine(train_data=train, val_data=val))


def test_clean_data_give_no_finding(tmp_path: Path) -> None:
    found = examine(train_data=made.write_split(tmp_path, "train", 0), val_data=made.write_split(tmp_path, "val", 500))
    assert amiss(found) == {}
    told = {each.name: each.text for each in found}
    assert told["train.captions"].endswith("train-{0..1}.tar (webdataset): 12 images, 24 captions, 2 per image")
    assert told["train.pictures"].startswith("12 of 12 pictures decoded: sides from 72 to 96 pixels")
    assert (
        told["leak.pictures"] == "no picture occurs in both splits; compared: 12 of 12 train and 12 of 12 val pictures"
    )
    assert {"train.ids", "val.ids", "leak.ids"} <= told.keys()


def about(number: int, **fields: Any) -> dict[str, Any]:
    return {"image_id": f"image {number}", "captions": made.captions(number), **fields}


JPEG = encoded(picture(7000))
TURNED = Image.Exif()
TURNED[0x0112] = 6
FAULTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "cut in the middle": ({"jpg": JPEG[: len(JPEG) // 2]}, {"train.pictures.unreadable": "truncated"}),
    "no picture": ({"jpg": b"<html>not found</html>"}, {"train.pictures.unreadable": "not an image"}),
    "no file of a picture": (
        {"jpg": None},
        {"train.samples.pictureless": "'image 7000'", "train.pictures.unreadable": "no field"},
    ),
    "tiny": ({"jpg": encoded(picture(7000, (40, 20)))}, {"train.pictures.tiny": "'image 7000' 40 x 20"}),
    "slim": ({"jpg": encoded(picture(7000, (400, 100)))}, {"train.pictures.slim": "400 x 100"}),
    "print": ({"jpg": encoded(picture(7000).convert("CMYK"))}, {"train.pictures.cmyk": "'image 7000'"}),
    "alpha": (
        {"jpg": None, "png": encoded(picture(7000).convert("RGBA"), "PNG")},
        {"train.pictures.alpha": "'image 7000'"},
    ),
    "turned": ({"jpg": encoded(picture(7000), exif=TURNED)}, {"train.pictures.turned": "'image 7000'"}),
    "blank": ({"jpg": encoded(Image.new("RGB", (90, 90), (9, 8, 7)))}, {"train.pictures.blank": "'image 7000'"}),
    "no captions": ({"json": {"image_id": 1}}, {"train.samples.refused": "has no captions"}),
    "no json": ({"json": None, "txt": b"\xff\xfe caption"}, {"train.samples.refused": "not UTF-8"}),
    "empty caption": ({"json": about(1, captions=["x y", " "])}, {"train.samples.refused": "empty caption"}),
    "html": (
        {"json": about(7000, captions=["a dog &amp; a cat", "two dogs"])},
        {"train.captions.markup": "dog &amp; a"},
    ),
    "mojibake": ({"json": about(7000, captions=["a caf\u00c3\u00a9 here"])}, {"train.captions.encoding": "caf"}),
    "control": ({"json": about(7000, captions=["a dog\x00 here"])}, {"train.captions.control": "dog"}),
    "a word": ({"json": about(7000, captions=["dog"])}, {"train.captions.short": "'dog'"}),
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


def test_the_same_sample_twice(tmp_path: Path) -> None:
    found = plant(tmp_path, x1=sample(3))
    assert list(found) == ["train.ids.repeated"] and found["train.ids.repeated"].level == "warning"
    assert "list 'captions'" in found["train.ids.repeated"].do


def test_an_image_of_both_splits_under_one_id(tmp_path: Path) -> None:
    found = plant(tmp_path, x1=sample(503))
    assert found.keys() == {"leak.ids", "leak.captions", "leak.pictures"}
    assert found["leak.ids"].level == "problem" and "leave these images out" in found["leak.ids"].do


def test_two_files_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    first, second = sample(1), sample(2)
    made.write_tar(path, {"0001": first, "0002": second})
    content = path.read_bytes().replace(b"0002.", b"0001.")
    # headers carry a checksum of their own bytes: one less for the digit that changed
    path.write_bytes(_mended(content))
    found = amiss(examine(train_data=str(path)))
    assert list(found) == ["train.samples.refused"] and "two files .jpg" in found["train.samples.refused"].text


def _mended(content: bytes) -> bytes:
    out = bytearray(content)
    for start in range(0, len(out), 512):
        if out[start : start + 5] == b"0001." and out[start + 257 : start + 262] == b"ustar":
            header = bytearray(out[start : start + 512])
            header[148:156] = b" " * 8
            out[start + 148 : start + 156] = b"%06o\0 " % sum(header)
    return bytes(out)


def test_a_shard_that_stops_in_the_middle(tmp_path: Path) -> None:
    train = made.write_split(tmp_path, "train", 0)
    path = tmp_path / "train-1.tar"
    path.write_bytes(path.read_bytes()[:12_000])
    found = examine(train_data=train)
    wrong = amiss(found)
    assert list(wrong) == ["train.shards.broken"] and wrong["train.shards.broken"].level == "problem"
    assert str(path) in wrong["train.shards.broken"].text and "train-0" not in wrong["train.shards.broken"].text
    told = next(each.text for each in found if each.name == "train.captions")
    assert 6 <= int(told.split(": ")[1].split()[0]) < 12, "what can be read is looked at"


def test_deep_pictures_and_huge_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grey = np.linspace(0, 60_000, 96 * 72).reshape(72, 96).astype(np.uint16)
    deep = sample(7000, jpg=None, png=encoded(Image.fromarray(grey), "PNG"))
    assert "train.pictures.deep" in plant(tmp_path, x=deep)
    monkeypatch.setattr(images, "HUGE", 96 * 72)
    found = plant(tmp_path, x=sample(7000, jpg=encoded(picture(7000, (200, 100)))))
    assert list(found) == ["train.pictures.huge"] and "'image 7000' 200 x 100" in found["train.pictures.huge"].text


def test_blank_pictures_are_told_of_once(tmp_path: Path) -> None:
    blank = encoded(Image.new("RGB", (90, 90), (9, 8, 7)))
    assert list(plant(tmp_path, a=sample(50, jpg=blank), b=sample(51, jpg=blank))) == ["train.pictures.blank"]


def test_no_leak_is_said_only_where_there_is_none(tmp_path: Path) -> None:
    for number, fields in enumerate(({"jpg": sample(503)["jpg"]}, {"jpg": encoded(picture(503), quality=40)})):
        train = made.write_split(tmp_path, f"train{number}", 0, x=sample(7000, **fields))
        found = examine(train_data=train, val_data=made.write_split(tmp_path, "val", 500))
        assert not any(each.name == "leak.pictures" and each.level == "ok" for each in found)


def test_many_unreadable_pictures_are_a_problem(tmp_path: Path) -> None:
    train = made.write_split(tmp_path, "train", 0, a=sample(50, jpg=b"x"), b=sample(51, jpg=b"y"))
    levels = [
        amiss(examine(train_data=train, max_bad_samples=most))["train.pictures.unreadable"].level for most in (0.001, 0.002)
    ]
    assert levels == ["problem", "warning"]


def test_sizes_are_held_against_the_model(tmp_path: Path, tiny_model: str) -> None:
    def names(size: tuple[int, int]) -> set[str]:
        planted = {f"x{n}": sample(n, jpg=encoded(picture(n, size))) for n in range(100, 112)}
        flags = {"model": tiny_model, "loss": "triplet", "batch_size": 4, "force_image_size": 128}
        return amiss(examine(train_data=made.write_split(tmp_path, "train", 0, count=2, **planted), **flags)).keys()

    assert names((96, 80)) == set()
    assert names((60, 50)) == {"train.pictures.small"}
    assert names((600, 520)) == {"train.pictures.large"}


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
    monkeypatch.setattr("coder_plugin.doctor.examine.SMALL", 10)
    train, val = made.write_split(tmp_path, "train", 0, count=40), made.write_split(tmp_path, "val", 500, count=8)
    flags = {"train_data": train, "val_data": val}
    found = examine(samples=5, **flags)
    assert list(amiss(found)) == ["leak.pictures.partial"]
    assert "5 of 40 train and 8 of 8 val" in amiss(found)["leak.pictures.partial"].text
    assert amiss(examine(samples=5, whole=True, **flags)) == {}
    monkeypatch.setattr(split, "MOST", 20)
    assert amiss(examine(samples=50, **flags)).keys() == {"train.partial"}
    assert amiss(examine(whole=True, **flags)) == {}


def test_a_sample_is_spread_over_the_data_and_repeats() -> None:
    data = split.Split("train", None, items=list(range(100)))  # type: ignore[arg-type]
    for seed in range(5):
        drawn = data.sample(10, seed)
        assert [number // 10 for number in drawn] == list(range(10)) and drawn == data.sample(10, seed)
    assert data.sample(10, 0) != data.sample(10, 1) and data.sample(100, 0) == data.items


def test_shards_beyond_the_most_are_left(tmp_path: Path) -> None:
    from coder_plugin.data import open_source

    source = open_source(made.write_split(tmp_path, "train", 0, count=20))
    assert (split.read_source("train", source, most=10).left, split.read_source("train", source, most=None).left) == (
        1,
        0,
    )
    everything = split.read_source("train", source)
    assert [item.key for item in everything.items] == [f"image {n}" for n in range(20)]
    assert [item.captions for item in everything.items] == [item.captions for _, item in source.items()]
    assert all(
        a.load().tobytes() == b.load().tobytes() for a, (_, b) in zip(everything.items, source.items(), strict=True)
    )


def test_remote_shards_are_not_fetched(tmp_path: Path) -> None:
    local = made.write_split(tmp_path, "train", 0).replace("{0..1}", "0")
    found = amiss(examine(train_data=f"{local}::https://example.org/more-0.tar"))
    assert list(found) == ["train.shards.remote"] and "1 shard " in found["train.shards.remote"].text
    assert list(amiss(examine(train_data="https://example.org/more-{0..1}.tar"))) == ["train.shards.remote"]


def test_commands_are_not_run(tmp_path: Path, tiny_model: str) -> None:
    """Nor are they for the model, whose making looks at the first image."""
    local = made.write_split(tmp_path, "train", 0).replace("{0..1}", "0")
    train = f"pipe:touch {tmp_path}/ran; cat {local}::{local}"
    flags = {"train_data": train, "model": tiny_model, "loss": "triplet", "batch_size": 4}
    found = examine(**flags, train_num_samples=24)
    assert amiss(found).keys() == {"train.shards.remote"} and not (tmp_path / "ran").exists()
    (steps,) = (each.text for each in found if each.name == "recipe.steps")
    assert steps.startswith("24 samples per epoch: 6 steps"), "of all the data"
    found = examine(**flags)
    assert "give --train-num-samples" in amiss(found)["recipe.refused"].text, "as a run would say"


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


@pytest.mark.parametrize("part", [4096, 7])
def test_each_of_many_copies_is_told_of_once(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """All pairs of a series grow with its square."""
    from coder_plugin.data.item import Item

    monkeypatch.setattr("coder_plugin.doctor.identity._COLUMNS", part)
    monkeypatch.setattr("coder_plugin.doctor.identity._AT_ONCE", part)
    shades = [Image.eval(picture(5), lambda value, n=n: value // 2 + n) for n in range(60)]  # type: ignore[misc]
    items = [Item(str(n), ("x",), lambda image=image: image) for n, image in enumerate([picture(6), *shades])]
    series = [look for look in images.look_at(items, "") if isinstance(look, images.Look)]
    same, near = copies(series)
    assert same == [] and [(a.key, b.key) for a, b in near] == [("1", str(n)) for n in range(2, 61)]
    val = [dataclasses.replace(look, pixels=look.pixels + b"x") for look in series]
    assert [(a.key, b.key) for a, b in copies(series, val)[1]] == [("0", "0"), *(("1", str(n)) for n in range(1, 61))]
    assert copies([dataclasses.replace(look, key="one") for look in series])[1] == [], "of one key"
    assert [(a.key, b.key) for a, b in copies(series, series[1:3])[1]] == [("2", "1"), ("1", "2")], "not with itself"


def test_pictures_of_one_colour_are_no_copies_of_each_other() -> None:
    def look(key: str, image: Image.Image) -> images.Look:
        from coder_plugin.data.item import Item

        (found,) = images.look_at([Item(key, ("x",), lambda: image)], "")
        assert isinstance(found, images.Look)
        return found

    ours = [look("a", picture(1)), look("b", picture(2)), look("c", picture(1)), look("d", picture(3))]
    brighter = look("e", Image.eval(picture(2), lambda value: min(255, value + 4)))
    same, near = copies([*ours, brighter])
    assert [(a.key, b.key) for a, b in same] == [("a", "c")] and [(a.key, b.key) for a, b in near] == [("b", "e")]
    assert copies(ours, [brighter])[1][0][0].key == "b" and copies([], ours) == ([], [])
    shapes = [Image.new("RGB", (96, 96), "white") for _ in range(2)]
    shapes[0].paste("black", (14, 14, 24, 24))
    shapes[1].paste("red", (14, 62, 24, 72))
    assert copies([look("g", shapes[0]), look("h", shapes[1])]) == ([], []), "much alike but for what is in them"
    thrice, none = copies([ours[0], ours[2], look("f", picture(1)), look("a", picture(1))])
    assert [(a.key, b.key) for a, b in thrice] == [("a", "c"), ("a", "f")] and none == []


def test_lengths_are_asked_of_the_tokenizer_alone() -> None:
    import torch

    known: dict[str, int] = {}

    def tokenizer(texts: list[str]) -> torch.Tensor:
        rows = [[known.setdefault(word, len(known) + 1) for word in text.split()][:5] for text in texts]
        return torch.tensor([row + [0] * (5 - len(row)) for row in rows])

    from coder_plugin.data.item import Item

    data = split.Split("val", None, items=[Item("a", ("one two three", "one two three four five six"), lambda: None)])  # type: ignore
    (found,) = check_lengths(data, tokenizer)
    assert found.name == "val.captions.long" and "1 of 2" in found.text
