"""SCAN's precomp folders: what the field's files give, what is written, and that every fault names its file."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coder_plugin.data.regions.base import Record, Regions
from coder_plugin.data.regions.precomp import PRECOMP, open_precomp
from coder_plugin.errors import CoderError

NAMES = ["391895", "522418", "184613"]


def features(images: int = 3, regions: int = 2, channels: int = 4, dtype="float32") -> np.ndarray:
    return np.random.default_rng(images).normal(size=(images, regions, channels)).astype(dtype)


def folder(path: Path, ims: np.ndarray | None = None, *, captions: int | None = 6, ids=NAMES, split="train") -> str:
    path.mkdir(parents=True, exist_ok=True)
    np.save(path / f"{split}_ims.npy", features() if ims is None else ims)
    if captions is not None:
        (path / f"{split}_caps.txt").write_text("".join(f"caption {k}\n" for k in range(captions)))
    if ids is not None:
        (path / f"{split}_ids.txt").write_text("".join(f"{each}\n" for each in ids))
    return str(path)


def fault(call, *args, **options) -> str:
    with pytest.raises(CoderError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def items(spec: str, split="train"):
    return [item for _, item in open_precomp(spec, split=split).items()]


def record(name: str, regions: int = 2, captions=("one", "two"), **more) -> Record:
    values = np.full((regions, 3), len(name), np.float32)
    return Record(name, Regions(values, **more), tuple(captions))


# what the field's files give


def test_a_folder_of_scan_s(tmp_path):
    spec = folder(tmp_path)
    got = items(spec)
    assert [item.key for item in got] == NAMES
    assert [item.captions for item in got] == [
        ("caption 0", "caption 1"),
        ("caption 2", "caption 3"),
        ("caption 4", "caption 5"),
    ]
    for item, values in zip(got, features(), strict=True):
        regions = item.load()
        assert np.array_equal(regions.features, values) and regions.boxes is None and regions.global_feature is None
        assert not regions.features.flags.writeable  # a part of the mapped file


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_features_keep_their_precision(tmp_path, dtype):
    got = items(folder(tmp_path, features(dtype=dtype)))[1].load().features
    assert got.dtype == np.dtype(dtype) and np.array_equal(got, features(dtype=dtype)[1])


@pytest.mark.parametrize("ids", [NAMES, [name for name in NAMES for _ in range(2)], None])
def test_rows_repeated_for_each_caption_are_one_image(tmp_path, ids):
    got = items(folder(tmp_path, np.repeat(features(), 2, axis=0), ids=ids))
    assert [item.key for item in got] == (NAMES if ids else ["train_0", "train_1", "train_2"])
    assert [item.captions[0] for item in got] == ["caption 0", "caption 2", "caption 4"]
    assert np.array_equal(got[2].load().features, features()[2])


@pytest.mark.parametrize("start", [0, 1])
def test_ids_that_only_count_do_not_join_images_of_different_splits(tmp_path, start):
    for split in ("train", "dev"):
        spec = folder(tmp_path, ids=range(start, start + 3), split=split)
    train, dev = items(spec), items(spec, "dev")
    assert not {item.image_id for item in train} & {item.image_id for item in dev}
    assert [item.names for item in train] == [(str(start + k),) for k in range(3)]


def test_val_is_dev_where_there_is_no_val(tmp_path):
    spec = folder(tmp_path, split="dev", ids=None)
    assert items(spec, "val")[0].key == "dev_0"
    folder(tmp_path, features(1), split="val", captions=2, ids=None)
    assert items(spec, "val")[0].key == "val_0"


def test_the_layout_of_vse_infinity(tmp_path):
    folder(tmp_path / "precomp")
    names = {name: f"val2014/COCO_val2014_{int(name):012d}.jpg" for name in NAMES}
    (tmp_path / "id_mapping.json").write_text(json.dumps(names | {"7": "another.jpg"}))
    for spec in (str(tmp_path), str(tmp_path / "precomp")):
        assert [item.key for item in items(spec)] == list(names.values())
        assert items(spec)[0].names == (NAMES[0],)
    file = PRECOMP.open(str(tmp_path), split="train")
    assert list(file) == list(names.values())
    for name in (NAMES[1], names[NAMES[1]], os.path.basename(names[NAMES[1]])):
        assert name in file and np.array_equal(file[name].features, features()[1])
    assert "7" not in file and "another.jpg" not in file


def test_boxes_and_sizes_of_camera(tmp_path):
    spec = folder(tmp_path)
    boxes = np.arange(24, dtype=np.float64).reshape(3, 2, 4)
    np.save(tmp_path / "train_boxes.npy", boxes)
    np.save(tmp_path / "train_img_sizes.npy", np.array([[640, 480], [500, 375], [32, 40]]))
    got = items(spec)[2].load()
    assert got.boxes.dtype == np.float32 and np.array_equal(got.boxes, boxes[2]) and got.size == (32.0, 40.0)


def test_a_test_split_beside_testall_is_warned_of(tmp_path, caplog):
    spec = folder(tmp_path, features(2), captions=4, ids=None, split="test")
    items(spec, "test")
    assert not caplog.records
    folder(tmp_path, features(10), captions=20, ids=None, split="testall")
    items(spec, "testall")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        items(spec, "test")
    message = caplog.records[0].getMessage()
    assert "test holds 2 of testall's 10 images" in message and "--split testall --folds 5" in message


# what is refused


@pytest.mark.parametrize(
    "options, words",
    [
        ({"captions": 7}, ["train_caps.txt", "7 captions", "3 images"]),
        ({"captions": 2}, ["train_caps.txt", "2 captions", "3 images"]),
        ({"captions": 0}, ["train_caps.txt", "0 captions"]),
        ({"captions": None}, ["train_caps.txt", "missing"]),
        ({"ids": ["1", "2"]}, ["train_ids.txt", "2 lines", "3 images"]),
        ({"ids": ["1", "2", "1"]}, ["train_ids.txt", "images 0 and 2", "'1'"]),
        ({"ids": ["1", "", "3"]}, ["train_ids.txt", "line 2"]),
        ({"ids": ["a", "a", "b", "c", "c", "c"]}, ["train_ids.txt", "line 4", "'c'", "line 3", "'b'"]),
        ({"ims": np.repeat(features(), 2, 0), "ids": ["1", "2"]}, ["train_ids.txt", "2 lines", "3 images"]),
        ({"ims": features(6), "ids": ["1", "1", "2", "2", "3", "3"]}, ["train_ids.txt", "2 lines", "differ"]),
        ({"ims": features()[0]}, ["train_ims.npy", "[2, 4]", "3 dimensions"]),
        ({"ims": features().astype(int)}, ["train_ims.npy", "int64", "floating point"]),
        ({"ims": features()[:0], "captions": 0, "ids": []}, ["train_ims.npy", "empty"]),
    ],
)
def test_faults(tmp_path, options, words):
    spec = folder(tmp_path, **options)
    message = fault(open_precomp, spec)
    assert all(word in message for word in words), message


def test_objects_are_refused_and_never_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    spec = folder(tmp_path)
    trap = np.empty((3, 1, 1), object)
    trap[:] = Trap()
    np.save(tmp_path / "train_ims.npy", trap, allow_pickle=True)
    assert "object" in fault(open_precomp, spec) and not (tmp_path / "sprung").exists()


def test_a_truncated_file_is_found_at_opening(tmp_path):
    spec = folder(tmp_path)
    path = tmp_path / "train_ims.npy"
    path.write_bytes(path.read_bytes()[:-1])
    message = fault(open_precomp, spec)
    assert "train_ims.npy" in message and "its 223 bytes" in message and "truncated" in message


def test_numbers_that_are_none_fail_the_image_alone(tmp_path):
    ims = features()
    ims[1, 0, 0] = np.nan
    got = items(folder(tmp_path, ims))
    got[0].load()
    with pytest.raises(ValueError, match="train_ims.npy: image '522418': 1 of 8 numbers"):
        got[1].load()


@pytest.mark.parametrize(
    "name, array, words",
    [
        ("boxes", np.zeros((4, 2, 4)), ["4 rows, but 3 in train_ims.npy"]),
        ("boxes", np.zeros((3, 2, 4)), ["train_img_sizes.npy", "missing"]),
        ("img_sizes", np.ones((3, 2)), ["train_boxes.npy", "missing"]),
        ("boxes", np.zeros((3, 1, 4)), ["[3, 1, 4]", "[3, 2, 4]"]),
        ("img_sizes", np.ones((3, 3)), ["[3, 3]", "[3, 2]"]),
    ],
)
def test_faults_of_extras(tmp_path, name, array, words):
    spec = folder(tmp_path)
    np.save(tmp_path / f"train_{name}.npy", array)
    message = fault(open_precomp, spec)
    assert all(word in message for word in [f"train_{name}.npy", *words]), message


def test_folders_and_splits_that_are_not_there(tmp_path):
    assert "nowhere: not a folder" in fault(open_precomp, str(tmp_path / "nowhere"))
    assert "no *_ims.npy" in fault(open_precomp, str(tmp_path))
    message = fault(open_precomp, folder(tmp_path), split="testall")
    assert "testall_ims.npy" in message and "splits present: train" in message


# what is written

floats = st.sampled_from(["float16", "float32", "float64"])


@st.composite
def splits(draw):
    dtype, channels = draw(floats), draw(st.integers(1, 4))
    number, boxed = draw(st.integers(1, 5)), draw(st.booleans())
    rows, captions = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    finite = {"allow_nan": False, "allow_infinity": False}
    found = []
    for image in range(number):
        width = {"float16": 16, "float32": 32, "float64": 64}[dtype]
        values = draw(arrays(dtype, (rows, channels), elements=st.floats(width=width, **finite)))
        boxes = draw(arrays("float32", (rows, 4), elements=st.floats(width=32, **finite))) if boxed else None
        size = (draw(st.floats(0.1, 1e4)), draw(st.floats(0.1, 1e4))) if boxed else (1.0, 1.0)
        found.append(Record(f"n{image}", Regions(values, boxes, size), tuple(f"c {image} {k}" for k in range(captions))))
    return found


def same(one: Regions, other: Regions) -> bool:
    def equal(left, right):
        if left is None or right is None:
            return left is right
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()

    parts = all(equal(getattr(one, name), getattr(other, name)) for name in ("features", "boxes"))
    return parts and one.size == other.size


@given(splits())
def test_what_is_written_is_read_back_to_the_bit(tmp_path_factory, records):
    path = str(tmp_path_factory.mktemp("written") / "x_precomp")
    assert PRECOMP.write(path, iter(records), split="dev") == len(records)
    file = PRECOMP.open(path, split="val")
    assert list(file) == [each.name for each in records] and len(file) == len(records)
    assert all(same(file[each.name], each.regions) for each in records)
    assert file.captions == {each.name: each.captions for each in records if each.captions}
    assert sorted(os.listdir(path)) == [name for name in sorted(os.listdir(path)) if name.startswith("dev_")]
    if records[0].captions:
        assert [item.captions for item in items(path, "dev")] == [each.captions for each in records]


def test_peers_can_read_what_is_written(tmp_path):
    records = [record("7", captions=["a\nb ", "c"]), record("11", captions=["d", "e"])]
    PRECOMP.write(str(tmp_path), records, split="test")
    ims = np.load(tmp_path / "test_ims.npy", allow_pickle=False)
    assert ims.shape == (2, 2, 3) and ims.dtype == np.float32
    assert [int(line) for line in (tmp_path / "test_ids.txt").read_text().splitlines()] == [7, 11]
    assert (tmp_path / "test_caps.txt").read_bytes() == b"a b\nc\nd\ne\n"
    assert sorted(os.listdir(tmp_path)) == ["test_caps.txt", "test_ids.txt", "test_ims.npy"]


@pytest.mark.parametrize(
    "second, words",
    [
        (record("x", captions=["one"]), ["'x' has 1 captions", "'first' 2", "--captions-per-image"]),
        (record("x", global_feature=np.ones(2, np.float32)), ["'x' has a feature of the whole image", "write shards"]),
        (record("x", extras={"objects_id": np.ones(2)}), ["'x' has further arrays (objects_id)", "--without-extras"]),
        (record("x", boxes=np.ones((2, 4), np.float32)), ["'x' has 2 boxes", "'first' no"]),
        (record("x", 3), ["'x' has 3 regions and 'first' 2", "write shards"]),
        (Record("x", Regions(np.ones((2, 3))), ("a", "b")), ["'x'", "float64 x 3", "'first'", "float32 x 3"]),
        (Record("x", Regions(np.ones((2, 2), "f4")), ("a", "b")), ["'x'", "x 2", "'first'", "x 3"]),
        (record("a\nb"), ["line break"]),
        (record("x", captions=["a", " \n"]), ["'x'", "empty caption"]),
    ],
)
def test_records_that_do_not_fit_leave_nothing(tmp_path, second, words):
    message = fault(PRECOMP.write, str(tmp_path), [record("first"), second], split="train")
    assert all(word in message for word in words), message
    assert not os.listdir(tmp_path)


def test_a_split_is_not_written_over(tmp_path):
    PRECOMP.write(str(tmp_path), [record("a")], split="train")
    assert "train_ims.npy" in fault(PRECOMP.write, str(tmp_path), [record("b")], split="train")
    PRECOMP.write(str(tmp_path), [record("b")], split="dev")
    assert list(PRECOMP.open(str(tmp_path), split="train")) == ["a"]


# how files are held
