"""CSV and Karpathy tables: what they give, and that every fault is named in one line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image

from coder_plugin.config import DataConfig
from coder_plugin.data import open_source, reader_options
from coder_plugin.data.bad_samples import BadSample, describe, nothing_to_read
from coder_plugin.data.decode import from_picture
from coder_plugin.data.from_config import make_source, reading_options
from coder_plugin.data.loader import TrainLoader
from coder_plugin.data.source import ItemSource
from coder_plugin.data.tables import open_csv, open_karpathy
from coder_plugin.errors import CoderError


def write_table(folder: Path, rows: list[tuple[str, ...]], *, header=("filepath", "title"), sep="\t") -> str:
    path = folder / "data.csv"
    path.write_text("\n".join(sep.join(row) for row in [header, *rows]) + "\n", encoding="utf-8")
    return str(path)


def picture(path: Path, colour: tuple[int, int, int] = (9, 8, 7), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), colour).convert(mode).save(path)


def karpathy(folder: Path, **changes: object) -> str:
    def entry(number: int, split: str, **more: object) -> dict[str, object]:
        sentences = [{"raw": f"caption {number} {letter}"} for letter in "ab"]
        return {"filename": f"{number}.png", "split": split, "imgid": number, "sentences": sentences, **more}

    entries = [entry(0, "train"), entry(1, "restval", filepath="val"), entry(2, "val"), entry(3, "test")]
    entries[0].update(changes)
    path = folder / "dataset.json"
    path.write_text(json.dumps({"images": entries}))
    return str(path)


def fault(call, *args, **options) -> str:
    with pytest.raises(CoderError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def dealt(data: ItemSource, *, epoch: int = 0, captions: str = "draw", **options) -> list[str]:
    made = TrainLoader(
        data, batch_size=1, transform=lambda _: torch.zeros(1), captions=captions, seed=options.pop("seed", 3), **options,
        tokenizer=lambda texts: torch.tensor([[int(n) for n in text.split("-")] for text in texts]),
    )  # fmt: skip
    return ["-".join(map(str, batch["text"][0].tolist())) for batch in made.epoch(epoch)]


# what a table gives


def test_csv_rows_of_one_image_are_one_item_in_order_of_the_rows(tmp_path):
    spec = write_table(tmp_path, [("b.png", "one"), ("a.png", "two"), ("b.png", "three")])
    items = [item for _, item in open_csv(spec).items()]
    assert [(item.key, item.captions) for item in items] == [("b.png", ("one", "three")), ("a.png", ("two",))]


def test_a_picture_of_a_csv_that_is_missing_is_named_where_it_is_looked_for_first(tmp_path):
    spec = write_table(tmp_path, [("nowhere/a.png", "one")])
    (tmp_path / "root").mkdir()
    for root, place in ((None, "nowhere/a.png"), (str(tmp_path / "root"), str(tmp_path / "root/nowhere/a.png"))):
        with pytest.raises(FileNotFoundError) as caught:
            open_csv(spec, image_root=root).item(0).load()
        assert caught.value.filename == place


def test_csv_flags_quotes_and_a_byte_order_mark(tmp_path, caplog):
    path = tmp_path / "x.csv"
    path.write_bytes('\ufeffimage,text,rest\na.png,"a dog, a ""cat""",1\n'.encode())
    data = open_csv(str(path), csv_separator=",", csv_img_key="image", csv_caption_key="text", metadata=["rest"])
    (_, item), = data.items()
    assert item.captions == ('a dog, a "cat"',) and item.metadata == {"rest": "1"}
    assert open_csv(write_table(tmp_path, [("a", "b")]), csv_separator="\\t").num_images == 1  # as a shell passes it
    assert "separated by" not in caplog.text
    (tmp_path / "semi.csv").write_text("filepath;title\na.png;a dog\n")
    caplog.set_level("INFO", "coder_plugin")
    assert open_csv(str(tmp_path / "semi.csv")).num_images == 1 and "columns are separated by ';'" in caplog.text
    for separator in (";;", '"', ""):
        assert repr(separator) in fault(open_csv, str(path), csv_separator=separator)


def test_karpathy_splits_restval_and_folders(tmp_path):
    picture(tmp_path / "images/val/1.png")
    spec = karpathy(tmp_path)
    assert [item.key for _, item in open_karpathy(spec).items()] == ["0.png", "val/1.png"]
    assert [item.key for _, item in open_karpathy(spec, split="val").items()] == ["2.png"]
    item = [item for _, item in open_karpathy(spec).items()][1]
    assert item.captions == ("caption 1 a", "caption 1 b") and item.load().size == (6, 4)


def test_without_pictures_no_folder_is_looked_for_and_nothing_loads(tmp_path):
    spec = karpathy(tmp_path)
    table = write_table(tmp_path, [("0.png", "x")])
    picture(tmp_path / "0.png")
    for data in (open_karpathy(spec, image_root="nowhere", pictures=False), open_csv(table, pictures=False)):
        item = pickle.loads(pickle.dumps(next(data.items())[1]))  # the loader's workers get it so
        with pytest.raises(ValueError, match="no picture: '0.png'"):
            item.load()
    seen, named = open_karpathy(spec), open_karpathy(spec, pictures=False)
    assert [(i, x.key, x.captions, x.names) for i, x in seen.items()] == [
        (i, x.key, x.captions, x.names) for i, x in named.items()
    ]


# what is refused


@pytest.mark.parametrize(
    "rows, header, words",
    [
        ([("a", "b")], ("image", "title"), ["'filepath'", "'image', 'title'", "--csv-img-key"]),
        ([("a", "b")], ("filepath", "text"), ["'title'", "'filepath', 'text'", "--csv-caption-key"]),
        ([("c.png", "fine"), ("c.png", " ")], ("filepath", "title"), ["line 3", "'c.png'", "empty caption"]),
        ([("c.png",)], ("filepath", "title"), ["line 2", "2 columns"]),
        ([("c.png", "one", "two")], ("filepath", "title"), ["line 2", "2 columns"]),
        ([("", "one")], ("filepath", "title"), ["line 2", "no image"]),
        ([], ("filepath", "title"), ["no images"]),
    ],
)
def test_csv_faults(tmp_path, rows, header, words):
    spec = write_table(tmp_path, rows, header=header)
    message = fault(open_csv, spec)
    assert all(word in message for word in [spec, *words]), message


@pytest.mark.parametrize("url", ["https://shop.example/img/0.jpg", "S3://bucket/0.jpg"])
def test_urls_are_not_fetched_and_the_error_says_so(tmp_path, url):
    table = write_table(tmp_path, [(url, "a shirt")])
    (tmp_path / "captions.json").write_text(karpathy_of(url))
    for data in (open_csv(table), open_csv(table, image_root=str(tmp_path)), open_karpathy(str(tmp_path / "captions.json"))):
        ((_, item),) = pickle.loads(pickle.dumps(list(data.items())))  # as worker processes get it
        with pytest.raises(BadSample, match="a URL, .*nothing is fetched. Download them first, .*img2dataset") as caught:
            item.load()
        bad = describe(item.key, caught.value)
        assert bad[0] == "file" and bad[2].endswith("train on its shards")  # not shortened
        assert "--image-root" not in str(nothing_to_read("table", [bad]))
    ((_, item),) = open_csv(table, pictures=False).items()
    assert item.captions == ("a shirt",)


def karpathy_of(name: str) -> str:
    return json.dumps({"images": [{"filename": name, "split": "train", "sentences": [{"raw": "a shirt"}]}]})


def test_a_faulty_row_makes_its_image_a_bad_sample(tmp_path):
    rows = [("a", "one"), ("b", " "), ("c",), ("", "two"), ("b", "three"), ("d", "four")]
    data = open_csv(write_table(tmp_path, rows))
    assert [(item.key, item.fault and item.fault.kind) for _, item in data.items()] == [
        ("a", None),
        ("b", "caption"),
        ("c", "caption"),
        ("line 5", "file"),
        ("d", None),
    ]
    assert (data.samples("draw"), data.samples("all")) == (5, 5)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sentences": []}, ["'0.png'", "no captions"]),
        ({"sentences": [{"raw": "fine"}, {"raw": " \n"}]}, ["'0.png'", "empty caption", "number 2 of 2"]),
        ({"sentences": [{"raw": 7}]}, ["'0.png'", "not text"]),
        ({"sentences": ["plain"]}, ["'0.png'", "'raw'"]),
        ({"filename": None}, ["images[0]", "'filename'"]),
        ({"filepath": ["val"]}, ["images[0]", "'filepath'"]),
        ({"filename": "1.png", "filepath": "val"}, ["two or more images", ": 1, the first: 'val/1.png'"]),
    ],
)
def test_karpathy_faults(tmp_path, changes, words):
    spec = karpathy(tmp_path, **changes)
    if words[0] == "two or more images":
        message = fault(open_karpathy, spec)
    else:
        data = open_karpathy(spec)
        (item,) = (item for _, item in data.items() if item.fault is not None)
        message = f"{data.name} {item.key!r} images[0] {item.fault}"
    assert all(word in message for word in [spec, *words]), message


# opening by name


def test_open_source_guesses_and_refuses(tmp_path):
    spec = write_table(tmp_path, [("a", "b")])
    assert open_source(spec).num_images == 1
    assert open_source(spec, csv_separator=None).num_images == 1  # None is: not given
    message = fault(open_source, spec, csv_seperator=",")
    assert "csv_seperator" in message and "csv_separator" in message
    assert "picture.gif" in fault(open_source, "picture.gif")
    assert "parquet" in fault(open_source, spec, "parquet")


def test_every_reader_declares_its_options_once():
    assert reader_options("csv")[:3] == ("csv_separator", "csv_img_key", "csv_caption_key")
    assert reader_options("hf-streaming") == reader_options("hf") and "image_column" in reader_options("hf")
    config = DataConfig(train="a.csv", image_root="r", csv_img_key="i", image_column="c", max_image_pixels=9)
    assert reading_options(config, "a.csv", pictures=False) == {
        "kind": "csv", "csv_separator": None, "csv_img_key": "i", "csv_caption_key": None, "image_root": "r", "pictures": False
    }
    with pytest.raises(BadSample, match="more than the 9 "):
        from_picture(Image.new("RGB", (5, 2)))
    reading_options(DataConfig(), "a.csv")  # the limit is that of the data that were named last
    assert from_picture(Image.new("RGB", (5, 2))).size == (5, 2)
    with pytest.raises(CoderError, match="--open-clip dataset_resampled draws shards, and a.csv is read by 'csv'"):
        make_source(DataConfig(train="a.csv", dataset_resampled=True), split="train")
    with pytest.raises(CoderError, match="--columns: x_caps.txt is read by 'caps', which keeps no further columns"):
        make_source(DataConfig(train="x_caps.txt"), split="train", metadata=["a"])
