"""Region shards: found by name, trained on as a stream, and damage named."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coder_plugin.data.regions.arrays import decode_npz, encode_npz
from coder_plugin.data.regions.base import Record, Regions
from coder_plugin.data.regions.shards import SHARDS, write, write_shard
from coder_plugin.data.shards import open_shards
from coder_plugin.data.tar_index import scan
from coder_plugin.errors import CoderError


def record(name: str, value: float = 1, captions=("one", "two")) -> Record:
    return Record(name, Regions(np.full((2, 3), value, np.float32)), tuple(captions))


def records(number: int = 7) -> list[Record]:
    return [record(f"val2014/{k}.jpg", k) for k in range(number)]


def tar_of(path: Path, fields: dict[str, bytes]) -> str:
    with tarfile.open(path, "w") as tar:
        for name, data in fields.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return str(path)


def fault(call, *args, **options) -> str:
    with pytest.raises(CoderError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


finite = {"allow_nan": False, "allow_infinity": False}


@st.composite
def region_sets(draw):
    dtype, rows = draw(st.sampled_from(["float16", "float32", "float64"])), draw(st.integers(1, 4))
    width = int(dtype[5:])
    values = draw(arrays(dtype, (rows, draw(st.integers(1, 3))), elements=st.floats(width=width, **finite)))
    boxes, size, extras = None, (1.0, 1.0), {}
    if draw(st.booleans()):
        boxes = draw(arrays("float32", (rows, 4), elements=st.floats(width=32, **finite)))
        size = (draw(st.floats(0.1, 1e4)), draw(st.floats(0.1, 1e4)))
    if draw(st.booleans()):
        extras = {"objects_id": draw(arrays("int64", rows)), "file": draw(arrays("float32", (rows, 2)))}
    whole = draw(st.none() | arrays(dtype, 3, elements=st.floats(width=width, **finite)))
    return Regions(values, boxes, size, whole, extras)


def same(one: Regions, other: Regions) -> bool:
    def equal(left, right):
        if left is None or right is None:
            return left is right
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()

    parts = all(equal(getattr(one, name), getattr(other, name)) for name in ("features", "boxes", "global_feature"))
    extras = set(one.extras) == set(other.extras) and all(equal(one.extras[n], other.extras[n]) for n in one.extras)
    return parts and extras and one.size == other.size


@given(region_sets())
def test_npz_is_read_back_to_the_bit_and_always_the_same(regions):
    data = encode_npz(regions)
    assert same(decode_npz(data, "x"), regions) and encode_npz(decode_npz(data, "x")) == data


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
captions = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3).map(tuple)


@given(st.dictionaries(names, st.tuples(region_sets(), captions), min_size=1, max_size=5))
def test_what_is_written_is_found_by_any_name(tmp_path_factory, found):
    path = str(tmp_path_factory.mktemp("shards"))
    assert write(path, (Record(name, *each) for name, each in found.items()), split="dev", shard_size=2) == len(found)
    file = SHARDS.open(path, split="dev")
    assert list(file) == list(found)
    assert all(same(file[name], regions) for name, (regions, _) in found.items())
    assert file.captions == {name: texts for name, (_, texts) in found.items() if texts}


def test_files_and_their_sizes(tmp_path):
    write(str(tmp_path), records(7), split="train", shard_size=3)
    write(str(tmp_path), records(2), split="dev")
    assert sorted(os.listdir(tmp_path)) == [
        "dev-000000.tar",
        "sizes.json",
        "train-000000.tar",
        "train-000001.tar",
        "train-000002.tar",
    ]
    sizes = json.loads((tmp_path / "sizes.json").read_text())
    assert sizes == {"train-000000.tar": 3, "train-000001.tar": 3, "train-000002.tar": 1, "dev-000000.tar": 2}
    assert [len(scan(str(tmp_path / name))) for name in sizes] == list(sizes.values())
    assert len(SHARDS.open(str(tmp_path), split="train")) == 7 and len(SHARDS.open(str(tmp_path), split="dev")) == 2


@pytest.mark.parametrize(
    "spec", ["train-{000000..000002}.tar", "train-*.tar", "train-000000.tar::{}/train-00000[12].tar"]
)
def test_shards_named_one_by_one(tmp_path, spec):
    write(str(tmp_path), records(7), split="train", shard_size=3)
    file = SHARDS.open(f"{tmp_path}/{spec.replace('{}', str(tmp_path))}", split="anything")
    assert list(file) == [each.name for each in records(7)]


def test_the_training_reader_gives_regions_under_the_same_names(tmp_path):
    write(str(tmp_path), records(7), split="train", shard_size=3)
    source, file = open_shards(f"{tmp_path}/train-*.tar"), SHARDS.open(str(tmp_path), split="train")
    assert source.num_images == 7 and source.samples("all") == 14
    items = [item for _, item in source.items()]
    assert [item.key for item in items] == list(file)
    assert all(same(item.load(), file[item.key]) and item.captions == ("one", "two") for item in items)
    (tmp_path / "sizes.json").unlink()
    assert open_shards(f"{tmp_path}/train-*.tar").num_images == 7


# what is refused


@pytest.mark.parametrize("cut", [1, 600, 3000])
def test_a_truncated_shard(tmp_path, cut):
    write_shard(path := str(tmp_path / "x.tar"), records())
    os.truncate(path, os.path.getsize(path) // 2 + cut)
    assert "x.tar" in fault(SHARDS.open, path)


def npz(**members: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **members)
    return file.getvalue()


BOXED = {"features": np.ones((1, 2)), "boxes": np.ones((1, 4))}


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "not an .npz"),
        (b"PK\x03\x04" + bytes(90), "damaged .npz"),
        (encode_npz(records(1)[0].regions)[:-9], "damaged .npz"),
        (npz(feats=np.ones((1, 2))), "no features: none of x, features, feat among feats"),
        (npz(features=np.array([None])), "'features' is pickled"),
        (npz(features=np.ones((2, 4)), boxes=np.ones((4, 4)), size=np.ones(2)), "4 boxes"),
        (npz(features=np.array([[np.nan]])), "1 of 1 numbers"),
        (npz(**BOXED, size=np.ones(3)), "width and height"),
        (npz(**BOXED, size=np.zeros(2)), "must be > 0"),
        (npz(features=np.ones((2, 2)), boxes=np.array([["a"]] * 2), size=np.ones(2)), "boxes is <U1, not numbers"),
    ],
)
def test_a_damaged_entry_fails_its_image_alone(tmp_path, data, words):
    path = tar_of(tmp_path / "x.tar", {"a.npz": encode_npz(records(1)[0].regions), "b.npz": data, "b.json": b"{}"})
    file = SHARDS.open(path)
    file["a"]
    with pytest.raises(ValueError, match="x.tar: image 'b': .*" + words):
        file["b"]


@pytest.mark.parametrize("note, words", [(b"{", "not JSON"), (b'{"captions": "dog"}', "'captions'"), (b"[" * 99999, "deep")])
def test_a_bad_sample_is_left_out_with_a_warning(tmp_path, caplog, note, words):
    good = encode_npz(Regions(np.ones((2, 3))))
    path = tar_of(tmp_path / "x.tar", {"a.npz": good, "a.json": note, "b.npz": good, "b.json": b"{}"})
    assert list(SHARDS.open(path)) == ["b"]
    assert "x.tar: left out 1 samples; the first: " in caplog.text and "sample 'a'" in caplog.text and words in caplog.text


def test_an_image_in_two_shards(tmp_path):
    for name in ("a", "b"):
        write_shard(str(tmp_path / f"{name}.tar"), [record("same")])
    message = fault(SHARDS.open, f"{tmp_path}/*.tar")
    assert "b.tar: image 'same' occurs in" in message and "a.tar, too" in message


def test_writing_refuses_and_leaves_nothing(tmp_path):
    assert "folder" in fault(write, str(tmp_path / "x-{000000..000001}.tar"), records())
    assert "no images" in fault(write, str(tmp_path), [])
    assert not os.listdir(tmp_path)
    write(str(tmp_path), records(1))
    assert "train-000000.tar" in fault(write, str(tmp_path), records(2))


def test_a_shard_is_aside_until_it_is_whole(tmp_path):
    def failing():
        yield record("a")
        assert not (tmp_path / "x.tar").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(str(tmp_path / "x.tar"), failing())
    assert not os.listdir(tmp_path)
