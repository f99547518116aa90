"""COCO's annotations, SCAN's caption lists and img2dataset's folders: what they give, and what they leave out or refuse."""

from __future__ import annotations

import io
import json
import pickle
import random
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from coder_plugin.data import guess_kind, open_source
from coder_plugin.data.captions import open_caps, open_coco, open_img2dataset
from coder_plugin.data.source import ItemSource
from coder_plugin.data.tables import open_karpathy
from coder_plugin.errors import CoderError


def fault(call, *args, **options) -> str:
    with pytest.raises(CoderError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows(data: ItemSource) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(item.key, item.captions, item.names) for _, item in data.items()]


def picture(path: Path, size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)


# COCO

IMAGES = [{"id": 42, "file_name": "b.jpg"}, {"id": 7, "file_name": "a.jpg"}]
ANNOTATIONS = [
    {"id": 9, "image_id": 7, "caption": "a nine"},
    {"id": 3, "image_id": 42, "caption": "b three"},
    {"id": 1, "image_id": 7, "caption": "a one"},
]


def coco(folder: Path, images=IMAGES, annotations=ANNOTATIONS, name: str = "captions_train2014.json") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"info": {"year": 2014}, "images": images, "licenses": [], "annotations": annotations}))
    return str(path)


def test_coco_images_and_captions_in_the_order_of_the_file(tmp_path):
    assert rows(open_coco(coco(tmp_path))) == [
        ("b.jpg", ("b three",), ("42",)),
        ("a.jpg", ("a nine", "a one"), ("7",)),
    ]


@given(st.dictionaries(st.integers(0, 10**6), st.lists(st.text(min_size=1).filter(str.strip), max_size=3), min_size=1))
def test_coco_every_caption_comes_back_at_its_image(tmp_path_factory, captions):
    entries = [(image, text) for image, texts in captions.items() for text in texts]
    random.Random(0).shuffle(entries)
    expected = {str(image): tuple(text for each, text in entries if each == image) for image in captions}
    spec = coco(
        tmp_path_factory.mktemp("coco"),
        [{"id": image, "file_name": f"{image}.jpg"} for image in captions],
        [{"id": n, "image_id": image, "caption": text} for n, (image, text) in enumerate(entries)],
    )
    if not entries:
        assert "has a caption" in fault(open_coco, spec)
        return
    assert {names[0]: texts for _, texts, names in rows(open_coco(spec))} == {k: v for k, v in expected.items() if v}


def test_coco_images_without_captions_are_counted_and_named_once(tmp_path, caplog):
    more = [{"id": n, "file_name": f"{n}.jpg"} for n in range(100, 103)]
    data = open_coco(coco(tmp_path, IMAGES + more))
    assert data.num_images == 2
    (record,) = caplog.records
    assert "left out 3 of 5 images without captions" in record.message and "'100.jpg'" in record.message
    message = fault(open_coco, coco(tmp_path, annotations=[]))
    assert "none of the 2 images" in message and "test" in message


def changed(number: int, **changes: object) -> list[dict[str, object]]:
    return [{**each, **(changes if n == number else {})} for n, each in enumerate(ANNOTATIONS)]


@pytest.mark.parametrize(
    "images, annotations, words",
    [
        (IMAGES[:1], ANNOTATIONS, ["not in 'images': 2, the first: annotations[0], id 9, of image 7"]),
        (IMAGES, changed(1, image_id=[42]), ["not in 'images': 1", "annotations[1]"]),
        (IMAGES, changed(1, image_id="42"), ["not in 'images': 1", "of image '42'"]),
        (IMAGES, [{"id": 1, "image_id": 7, "bbox": [0, 0, 1, 1]}], ["none of 1 images", "not text"]),
        (IMAGES, changed(2, id=3), ["annotations that share their 'id' with another: 1, the first: 3"]),
        ([*IMAGES, {"id": 7, "file_name": "c.jpg"}], ANNOTATIONS, ["share their 'id'", ": 1, the first: 7"]),
        ([*IMAGES, {"id": 8, "file_name": "a.jpg"}], ANNOTATIONS, ["share their 'file_name'", ": 1, the first: 'a.jpg'"]),
        ([*IMAGES, {"id": 8}, {"file_name": "c"}], ANNOTATIONS, ["without an 'id' or a 'file_name': 2", "images[2]"]),
        (["a.jpg"], ANNOTATIONS, ["no list 'images' of objects"]),
        (IMAGES, None, ["no list 'annotations' of objects"]),
        ([], [], ["none of the 0 images"]),
    ],
)
def test_coco_faults(tmp_path, images, annotations, words):
    spec = coco(tmp_path, images, annotations)
    message = fault(open_coco, spec)
    assert all(word in message for word in [spec, *words]), message


@pytest.mark.parametrize("caption", [" ", ["a"], None])
def test_a_faulty_annotation_makes_its_image_a_bad_sample(tmp_path, caption):
    items = [item for _, item in open_coco(coco(tmp_path, IMAGES, changed(2, caption=caption))).items()]
    (bad,) = (item for item in items if item.fault is not None)
    assert bad.fault.kind == "caption" and bad.captions == () and bad.names == (str(ANNOTATIONS[2]["image_id"]),)
    assert len(items) == 2


# SCAN


def caps(folder: Path, captions: list[str], ids: list[object] | None = None, name: str = "train_caps.txt") -> str:
    path = folder / name
    path.write_text("".join(f"{each}\n" for each in captions), encoding="utf-8", newline="\n")
    if ids is not None:
        (folder / name.replace("caps", "ids")).write_text("".join(f"{each}\n" for each in ids))
    return str(path)


def test_caps_five_lines_an_image_without_ids(tmp_path):
    lines = [f"line {n}" for n in range(10)]
    spec = caps(tmp_path, lines)
    assert rows(open_caps(spec)) == [("train_0", tuple(lines[:5]), ("0",)), ("train_1", tuple(lines[5:]), ("1",))]


def test_caps_an_id_an_image_or_a_caption_which_need_not_be_sorted(tmp_path):
    spec = caps(tmp_path, list("abcdef"), [391895, "x.jpg"])
    assert rows(open_caps(spec)) == [
        ("391895", ("a", "b", "c"), ()),
        ("x.jpg", ("d", "e", "f"), ()),
    ]
    spec = caps(tmp_path, list("abcd"), [7, 5, 7, 7])
    assert rows(open_caps(spec)) == [("7", ("a", "c", "d"), ()), ("5", ("b",), ())]


@pytest.mark.parametrize("start", [0, 1])
def test_caps_ids_that_only_count_make_the_keys_that_they_make_in_precomp(tmp_path, start):
    spec = caps(tmp_path, list("abcd"), [start, start, start + 1, start + 1], name="dev_caps.txt")
    assert rows(open_caps(spec)) == [
        ("dev_0", ("a", "b"), (str(start),)),
        ("dev_1", ("c", "d"), (str(start + 1),)),
    ]


def test_captions_alone_need_no_pictures(tmp_path):
    for data in (open_coco(coco(tmp_path), image_root="nowhere", pictures=False), open_caps(caps(tmp_path, ["a"] * 5))):
        item = pickle.loads(pickle.dumps(next(data.items())[1]))
        assert item.paths == ()
        with pytest.raises(ValueError, match=f"no picture: '{item.key}'"):
            item.load()


@pytest.mark.parametrize(
    "captions, ids, words",
    [
        (["a", "", "c", " \t"], None, ["train_caps.txt: line 2 is empty"]),
        (["b''"], None, ["line 1 is empty"]),
        (["a", r"b'\xff'"], None, ["line 2 is not UTF-8 text"]),
        (["a"] * 7, None, ["7 captions", "not five for each image"]),
        (["a"] * 7, [1, 2, 3], ["7 captions", "3 ids in train_ids.txt"]),
        (["a"] * 2, [], ["2 captions", "0 ids"]),
        (["a"] * 2, [1, 2, 3], ["2 captions", "3 ids"]),
        (["a"] * 6, [1, 2, 1], ["train_ids.txt: ids of two or more images: 1, the first: '1'"]),
        (["a"] * 2, [1, ""], ["train_ids.txt: line 2 is empty"]),
        ([], None, ["no images"]),
    ],
)
def test_caps_faults(tmp_path, captions, ids, words):
    message = fault(open_caps, caps(tmp_path, captions, ids))
    assert all(word in message for word in [str(tmp_path), *words]), message


# img2dataset


def downloaded(folder: Path, key: str, **changes: object) -> None:
    """An image as img2dataset writes it; a change to None leaves the file out."""
    note = {"url": "https://x/y", "key": key, "status": "success", "caption": f"json {key}", "sha256": "0", "uid": f"u{key}"}
    files = {"txt": f"text {key}\n", "json": json.dumps(note), **changes}
    place = folder / key[:5] / key
    picture(place.with_suffix(".jpg"))
    if "jpg" in changes:
        place.with_suffix(".jpg").unlink()
    for ending in ("txt", "json"):
        if files[ending] is not None:
            place.with_suffix(f".{ending}").write_text(str(files[ending]), encoding="utf-8")


def test_img2dataset_captions_keys_and_pictures(tmp_path):
    keys = ["000000000", "000000001", *(f"{shard:05d}0000" for shard in range(1, 12))]
    for key in keys[::2] + keys[1::2]:
        downloaded(tmp_path, key)
    for name in ("00000.parquet", "00000_stats.json", "00001/.DS_Store", "00001/readme"):
        (tmp_path / name).write_text("{}")
    data = open_img2dataset(str(tmp_path))
    assert rows(data) == [(f"{key[:5]}/{key}", (f"text {key}",), (key, key, f"u{key}")) for key in keys]
    assert pickle.loads(pickle.dumps(next(data.items())[1])).load().size == (6, 4)


def test_img2dataset_what_is_left_out_is_counted_and_named(tmp_path, caplog):
    downloaded(tmp_path, "000000000")
    downloaded(tmp_path, "000000001", json=json.dumps({"status": "failed_to_download"}), jpg=None)
    downloaded(tmp_path, "000000002", json=json.dumps({"status": "failed_to_resize"}))
    downloaded(tmp_path, "000000003", jpg=None)
    downloaded(tmp_path, "000000004", txt=" \n")
    downloaded(tmp_path, "000010005", txt=None, json=json.dumps({"caption": None}))
    assert [key for key, _, _ in rows(open_img2dataset(str(tmp_path)))] == ["00000/000000000"]
    told = [record.message.removeprefix(f"{tmp_path}: left out ") for record in caplog.records]
    assert told == [
        "2 images that were not downloaded (status), the first: '00000/000000001'",
        "1 images without a picture, the first: '00000/000000003'",
        "2 images without a caption, the first: '00000/000000004'",
    ]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"json": '{"status": "succ'}, ["caption: ", "000000001.json", "cannot be read as JSON"]),
        ({"json": "[" * 100_000}, ["caption: ", "000000001.json", "nested too deep"]),
        ({"json": "[]"}, ["caption: ", "000000001.json", "not an object"]),
        ({"json": '{"caption": 3}', "txt": None}, ["caption: ", "000000001.json", "'caption' is not text"]),
    ],
)
def test_faulty_files_of_img2dataset_are_bad_samples(tmp_path, changes, words):
    downloaded(tmp_path, "000000000")
    downloaded(tmp_path, "000000001", **changes)
    first, second = (item for _, item in open_img2dataset(str(tmp_path)).items())
    message = f"{second.fault.kind}: {second.fault}"
    assert first.fault is None and all(word in message for word in words), message


# told apart by name or content


def test_json_files_are_told_apart_by_their_starts(tmp_path):
    many = [{"id": n, "file_name": f"COCO_{n:012d}.jpg"} for n in range(4000)]
    notes = [{"id": n, "image_id": n, "caption": 'about "sentences"'} for n in range(4000)]
    long = coco(tmp_path, many, notes)
    assert Path(long).stat().st_size > 3 * 65536 and guess_kind(long) == "coco"
    assert guess_kind(coco(tmp_path)) == "coco"
    (tmp_path / "turned.json").write_text(json.dumps({"annotations": notes, "images": many}))
    assert guess_kind(str(tmp_path / "turned.json")) == "coco"

    karpathy = tmp_path / "dataset.json"
    sentences = [{"raw": 'a "file_name"', "tokens": ["annotations", "image_id"], "imgid": 0}]
    images = [{"filepath": "val2014", "filename": f"{n}.jpg", "split": "train", "sentences": sentences} for n in range(2000)]
    for content in ({"images": images, "dataset": "coco"}, {"dataset": "coco", "images": images[:1]}):
        karpathy.write_text(json.dumps(content))
        assert guess_kind(str(karpathy)) == "karpathy"
    assert open_karpathy(str(karpathy)).num_images == 1
    for unknown in ("absent.json", "empty.json"):
        (tmp_path / "empty.json").touch()
        assert guess_kind(str(tmp_path / unknown)) == "karpathy"


def shard(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(path.with_suffix(".png"))
    content = path.with_suffix(".png").read_bytes()
    path.with_suffix(".png").unlink()
    with tarfile.open(path, "w") as tar:
        for n in range(count):
            for field, data in (("png", content), ("json", b"{}"), ("txt", f"thing {n}".encode())):
                info = tarfile.TarInfo(f"{n:09d}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def test_the_folder_that_img2dataset_writes_is_its_shards_and_not_the_table_beside_them(tmp_path):
    folder = tmp_path / "d [1]"
    for n in range(2):
        shard(folder / f"0000{n}.tar", 4)
        (folder / f"0000{n}.parquet").touch()
        (folder / f"0000{n}_stats.json").write_text("{}")
    assert guess_kind(str(folder)) == "webdataset"
    source = open_source(str(folder))
    assert source.samples("draw") == 8
    assert [item.key for _, item in source.items()][::4] == ["00000/000000000", "00001/000000000"]
    shard(tmp_path / "e/train-0.tar", 1)  # of which others may be of another split
    (tmp_path / "e/list.parquet").touch()
    mixed = str(tmp_path / "e")
    assert f"a folder of shards: give those of this split, such as '{mixed}/*.tar'" in fault(guess_kind, mixed)
    assert open_source(mixed, "webdataset").samples("draw") == 1
    for n in range(2):
        shard(tmp_path / f"benchmark/{n}.tar", 3)
    (tmp_path / "benchmark/nshards.txt").write_text("1")  # it lists the shards of the folder
    assert open_source(str(tmp_path / "benchmark")).samples("draw") == 3
    (tmp_path / "parts").mkdir()
    (tmp_path / "e").rename(tmp_path / "parts/0")
    assert "such as '" + str(tmp_path / "parts/*/*.tar") in fault(guess_kind, str(tmp_path / "parts"))
    (tmp_path / "f").mkdir()
    for name in ("00000.parquet", "00000.tfrecord"):
        (tmp_path / "f" / name).touch()
    assert "tfrecord files are not read" in fault(guess_kind, str(tmp_path / "f"))
