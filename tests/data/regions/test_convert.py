"""Conversion of every layout to shards and precomp, and captions joined to regions by the images' names."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from coder_plugin import registry
from coder_plugin.data.captions import open_caps
from coder_plugin.data.item import Item
from coder_plugin.data.regions import guess_format, open_regions
from coder_plugin.data.regions.base import Record, RegionFormat, Regions
from coder_plugin.data.regions.convert import convert
from coder_plugin.data.regions.join import RegionSource
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from tests.data.regions import layouts

MODULES = ("precomp", "shards", "tsv", "hdf5", "lmdb_", "folder")
PLACES = {
    "precomp": "x_precomp",
    "shards": "x-shards",
    "bua": "x.tsv",
    "lxmert": "x.tsv",
    "hdf5": "x.h5",
    "lmdb": "x.lmdb",
}
NAMES = ["391895", "522418", "184613"]


def formats() -> dict[str, tuple[str, RegionFormat]]:
    found = {}
    for module in MODULES:
        try:
            content = vars(importlib.import_module(f"coder_plugin.data.regions.{module}"))
        except ModuleNotFoundError:
            continue
        for name, value in content.items():
            if isinstance(value, RegionFormat):
                found[name.lower()] = (f"coder_plugin.data.regions.{module}:{name}", value)
    return found


FORMATS = formats()
EXTRAS = set(FORMATS) - {"bua", "hdf5", "precomp"}
TARGETS = ("precomp", "shards")
WRITERS = {
    "bua": layouts.write_tsv,
    "lxmert": layouts.write_lxmert,
    "hdf5": layouts.write_hdf5,
    "lmdb": layouts.write_lmdb,
    "folder": layouts.write_folder,
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    plugins = [
        registry.Plugin(group="regions", name=name, distribution="coder-plugin", version="0", target=target)
        for name, (target, _) in FORMATS.items()
    ]
    monkeypatch.setitem(registry._cache, "regions", tuple(plugins))


def regions(number: int) -> Regions:
    """What every format can hold."""
    rng = np.random.default_rng(number)
    corners = rng.uniform(0, 200, (3, 4)).astype(np.float32)
    boxes = np.concatenate([corners[:, :2], corners[:, :2] + corners[:, 2:]], axis=1)
    extras = {"objects_id": rng.integers(9, size=3), "attrs_id": rng.integers(9, size=3)}
    extras |= {name: rng.random(3).astype(np.float32) for name in ("objects_conf", "attrs_conf")}
    return Regions(rng.normal(size=(3, 4)).astype(np.float32), boxes, (640.0, 480.0), None, extras)


def records(captions: int = 0) -> list[Record]:
    return [Record(name, regions(k), tuple(f"{k} {c}" for c in range(captions))) for k, name in enumerate(NAMES)]


def place(folder: Path, kind: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / PLACES.get(kind, f"x_{kind}"))


def written(folder: Path, kind: str = "precomp", captions: int = 0) -> str:
    path = place(folder, kind)
    found = records(captions)
    if kind not in EXTRAS:
        found = [each._replace(regions=replace(each.regions, extras={})) for each in found]
    if kind in WRITERS:
        WRITERS[kind](path, found)
    else:
        FORMATS[kind][1].write(path, found, split="train")
    return path


def read(path: str, kind: str) -> dict[str, Regions]:
    layout = FORMATS[kind][1]
    return dict(layout.open(path)) if layout.open else {entry.name: entry.load() for entry in layout.read(path)}


def captioned(*keys: str, names=(), name="captions") -> ItemSource:
    return ItemSource([Item(key, (f"of {key}", "two"), None, tuple(names)) for key in keys], name=name)


def fault(call, *args, **options) -> str:
    with pytest.raises(CoderError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def quietly(*args, **options):
    return convert(*args, progress=False, **options)


@pytest.mark.parametrize("one, other", list(product(FORMATS, TARGETS)))
def test_every_layout_becomes_shards_and_precomp(tmp_path, one, other):
    source, destination = written(tmp_path / "from", one), place(tmp_path / "to", other)
    kinds = {"from_kind": one, "to_kind": other}
    if other == "precomp" and one in EXTRAS:
        message = fault(quietly, source, destination, **kinds)
        assert "(attrs_conf, attrs_id, objects_conf, objects_id), which precomp files cannot store" in message
        assert "--without-extras" in message and (not os.path.exists(destination) or not os.listdir(destination))
    report = quietly(source, destination, **kinds, extras=other != "precomp")
    assert report.images == 3 and (report.from_kind, report.to_kind) == (one, other)
    before, after = read(source, one), read(destination, other)
    assert list(after) == list(before) and set(before) == set(NAMES)
    for name in NAMES:
        assert after[name].features.tobytes() == before[name].features.tobytes()
        assert after[name].boxes.tobytes() == before[name].boxes.tobytes()
        assert after[name].size == before[name].size
        if {one, other} <= EXTRAS:
            assert before[name].extras.keys() == after[name].extras.keys()
            assert all(np.array_equal(after[name].extras[k], v) for k, v in before[name].extras.items())


@pytest.mark.parametrize("there, back", [("shards", "precomp"), ("precomp", "shards")])
def test_captions_of_the_file_itself_go_along(tmp_path, there, back):
    source = written(tmp_path / "from", there, captions=2)
    report = quietly(source, destination := place(tmp_path / "to", back), to_split="dev", extras=False)
    assert report.captions == 6 and "3 images with 6 captions written" in str(report)
    assert open_regions(destination, split="dev").captions == {each.name: each.captions for each in records(2)}


def test_captions_joined_in_decide_which_images_and_set_their_names(tmp_path):
    keys = [f"val2014/COCO_val2014_{int(name):012d}.jpg" for name in reversed(NAMES)]
    report = quietly(written(tmp_path), place(tmp_path, "shards"), captions=captioned(*keys[:2]))
    assert report.images == 2 and report.captions == 4 and report.missing == [] and report.unused == [NAMES[0]]
    assert "1 images with regions but no captions" in str(report) and NAMES[0] in str(report)
    file = open_regions(place(tmp_path, "shards"))
    assert list(file) == [keys[1], keys[0]]  # in the order of the file of regions
    assert np.array_equal(file[keys[0]].features, regions(2).features)
    assert file.captions[keys[1]] == (f"of {keys[1]}", "two")


def test_captioned_images_without_regions(tmp_path):
    source, destination = written(tmp_path), place(tmp_path, "shards")
    captions = captioned(*NAMES, "7", "8")
    message = fault(quietly, source, destination, captions=captions)
    assert "2 of 5 images of captions have no regions" in message and "'7', '8'" in message
    assert not os.path.exists(destination)
    report = quietly(source, destination, captions=captions, missing_ok=True)
    assert report.images == 3 and report.missing == ["7", "8"] and "'7', '8'" in str(report)


def test_damaged_images(tmp_path, caplog):
    source, destination = written(tmp_path), place(tmp_path, "shards")
    ims = np.load(f"{source}/train_ims.npy")
    ims[1, 2, 3] = np.inf
    np.save(f"{source}/train_ims.npy", ims)
    assert "'522418'" in fault(quietly, source, destination)
    assert not os.path.exists(destination) or not os.listdir(destination)
    report = quietly(source, destination, missing_ok=True)
    assert report.images == 2 and report.damaged[0][0] == "522418" and "NaN or infinite" in str(report)
    assert "522418" in caplog.text and list(open_regions(destination)) == [NAMES[0], NAMES[2]]


def test_the_format_is_guessed_where_one_alone_fits(tmp_path, monkeypatch):
    assert guess_format(written(tmp_path)) == "precomp" and guess_format("x-{00..10}.tar") == "shards"
    message = fault(guess_format, "x.unknown")
    assert "x.unknown" in message and "precomp" in message and "shards" in message
    twin = registry.Plugin(
        group="regions", name="twin", distribution="d", version="0", target="coder_plugin.data.regions.precomp:PRECOMP"
    )
    broken = registry.Plugin(group="regions", name="broken", distribution="d", version="0", target="nothing.here:X")
    monkeypatch.setitem(registry._cache, "regions", (*registry._cache["regions"], twin, broken))
    assert "precomp, twin" in fault(guess_format, str(tmp_path / "x_precomp"))
    assert guess_format("x.tar") == "shards"
    assert "broken" in fault(open_regions, "x.tar", "broken")


# captions from one place and regions from another


def joined(path: str, captions: ItemSource, **options) -> RegionSource:
    return RegionSource(captions, open_regions(path), **options)


def test_a_joined_source_deals_the_same_batches_with_regions(tmp_path):
    path = written(tmp_path)
    captions = captioned(*(f"COCO_val2014_{int(name):012d}.jpg" for name in NAMES))
    source = joined(path, captions)
    assert source.num_images == 3 and source.samples("all") == 6 and source.name == "captions"
    assert (source.groups, source.caption_counts) == ([3], [2, 2, 2])
    for number, (index, item) in enumerate(source.items()):
        assert source.item(number).captions == captions.item(number).captions == item.captions
        assert index == number and np.array_equal(item.load().features, regions(number).features)


@pytest.mark.parametrize(
    "key, names", [("x", NAMES[:1]), ("x.jpg", ("y", f"val/C_{NAMES[0]}.png")), (f"{NAMES[0]}.jpg", ())]
)
def test_names_that_are_looked_for(tmp_path, key, names):
    source = joined(written(tmp_path), captioned(key, names=names))
    assert np.array_equal(next(source.items())[1].load().features, regions(0).features)


def test_kinds_of_names_do_not_mix(tmp_path):
    """The second image has no number of the first kind, and one of the other kind that is a third image's first."""
    items = [Item(f"{n}.jpg", ("x",), None, names) for n, names in enumerate([("6", "70"), (None, "8"), ("8", "90")])]
    source = RegionSource(ItemSource(items), {"6": "six", "8": "eight"})
    loaded = [item for _, item in source.items()]
    assert (loaded[0].load(), loaded[2].load()) == ("six", "eight")
    with pytest.raises(ValueError, match="'1.jpg'"):
        loaded[1].load()


def test_ids_that_count_do_not_join_numbers_of_another_list(tmp_path):
    path = place(tmp_path, "precomp")
    given_ = [Record(str(n), replace(regions(n), extras={}), ("a",)) for n in range(6)]
    FORMATS["precomp"][1].write(path, given_, split="train")
    items = [Item(f"p{n}.jpg", ("x",), None, (None, str(n))) for n in range(2, 8)]
    message = fault(joined, path, ItemSource(items, name="karpathy"))
    assert "none of 6 images has regions" in message and "'train_0'" in message
    assert "none of 6" in fault(quietly, path, place(tmp_path, "shards"), captions=ItemSource(items))
    caps = open_caps(f"{path}/train_caps.txt")  # of the same folder
    assert [item.key for _, item in joined(path, caps, max_missing=0).items()] == [f"train_{n}" for n in range(6)]


def test_the_rule_is_told_unless_it_is_the_key_itself(tmp_path, caplog):
    path = written(tmp_path)
    with caplog.at_level(logging.INFO, logger="coder_plugin.data.regions.join"):
        joined(path, captioned(*NAMES))
        assert not caplog.records
        joined(path, captioned(*(f"val/C_{int(name):012}.jpg" for name in NAMES)))
        joined(path, ItemSource([Item(f"{name}.x", ("a",), None, (None, name)) for name in NAMES], name="c"))
    first, second = (record.getMessage() for record in caplog.records)
    key = f"val/C_{int(NAMES[0]):012}.jpg"
    assert f"matched by the image's key, the number at its end: those of '{key}' are '{NAMES[0]}'" in first
    assert f"c: regions are matched by the image's other name 2, unchanged: those of '{NAMES[0]}.x'" in second


def test_one_rule_names_all_images(tmp_path):
    """The last image's own number is not in the file, and its number elsewhere is another image's there."""
    keys = [f"a_{name}.jpg" for name in NAMES[:2]] + ["a_99.jpg"]
    others = [("0",), ("1",), (NAMES[2],)]
    items = [Item(key, ("x",), None, names) for key, names in zip(keys, others, strict=True)]
    source = joined(written(tmp_path), ItemSource(items))
    loaded = [item for _, item in source.items()]
    loaded[1].load()
    with pytest.raises(ValueError, match="a_99.jpg"):
        loaded[2].load()


def test_two_images_do_not_share_regions(tmp_path):
    message = fault(joined, written(tmp_path), captioned(f"a/{NAMES[0]}.jpg", f"b/{NAMES[0]}.jpg"))
    assert f"'a/{NAMES[0]}.jpg' and 'b/{NAMES[0]}.jpg'" in message


def test_no_name_in_common_shows_one_of_each_side(tmp_path):
    message = fault(joined, written(tmp_path), captioned("cat.jpg", names=("tom",)))
    assert "none of 1 images" in message and "'cat.jpg'" in message and "'tom'" in message and NAMES[0] in message


def test_some_missing_are_warned_of_and_fail_to_load(tmp_path, caplog):
    path = written(tmp_path)
    with caplog.at_level(logging.WARNING):
        source = joined(path, captioned(*NAMES, "7", "8", "9", "10"), max_missing=0.004)
    assert "4 of 7 images have no regions, such as '7', '8', '9' and 1 more" in caplog.text
    with pytest.raises(ValueError, match="'7'"):
        [item for _, item in source.items()][3].load()
    assert "at most 3 may" in fault(joined, path, captioned(*NAMES, "7", "8", "9", "10"), max_missing=0.003)


# what is trained on and what is only converted


@pytest.mark.parametrize("kind", WRITERS)
def test_a_layout_that_is_not_trained_on_names_the_command_that_converts_it(tmp_path, kind):
    folder = tmp_path / "of.1"
    folder.mkdir()
    path = written(folder, kind)  # a dot of a folder above it ends no file's name
    message = fault(open_regions, path, kind)
    target = f"{os.path.splitext(path)[0]}-shards"
    assert os.path.dirname(target) == str(folder)
    assert f"coder-plugin regions convert '{path}' {target} --from {kind})" in message
    assert quietly(path, target, from_kind=kind).images == 3
    assert list(open_regions(target)) == sorted(NAMES) if kind in ("lmdb", "folder") else NAMES


@pytest.mark.parametrize("kind", TARGETS)
def test_images_are_looked_up_in_the_only_split_there_is(tmp_path, kind):
    """As ``regions extract`` writes all pictures as one split, from which training and validation take theirs."""
    path = written(tmp_path, kind)
    assert list(open_regions(path, split="val")) == list(open_regions(path, split="train")) == NAMES
    FORMATS[kind][1].write(path, [Record("x", replace(regions(0), extras={}))], split="test")
    assert list(open_regions(path, split="test")) == ["x"] and list(open_regions(path, split="train")) == NAMES
    assert "splits present: test, train" in fault(open_regions, path, split="val")
    assert ".tar'" in fault(open_regions, path, split="val") or kind == "precomp"
    FORMATS[kind][1].write(path, [Record("y", replace(regions(0), extras={}))], split="dev")
    assert list(open_regions(path, split="val")) == ["y"]
    assert "train" in fault(quietly, path, place(tmp_path / "to", kind), split="val2")  # a conversion takes no other split


def test_several_files_become_one(tmp_path):
    one, other = written(tmp_path / "a", "bua"), place(tmp_path / "b", "bua")
    WRITERS["bua"](other, [Record("7", replace(regions(7), extras={}))])
    report = quietly(f"{one}::{other}", place(tmp_path, "shards"), from_kind="bua")
    assert report.images == 4 and list(open_regions(place(tmp_path, "shards"))) == [*NAMES, "7"]
    message = fault(quietly, f"{one}::{one}", place(tmp_path / "c", "shards"), from_kind="bua")
    assert f"image '{NAMES[0]}' occurs twice" in message and not os.listdir(place(tmp_path / "c", "shards"))
    both = f"{place(tmp_path, 'shards')}::{written(tmp_path / 'd', 'shards')}"
    assert f"image '{NAMES[0]}' occurs in" in fault(open_regions, both)


@pytest.mark.parametrize("kind", WRITERS)
def test_captions_are_joined_to_a_file_that_is_read_in_its_order(tmp_path, kind):
    captions = captioned(*(f"COCO_{int(name):012d}.jpg" for name in NAMES[:2]))
    report = quietly(written(tmp_path, kind), place(tmp_path, "shards"), from_kind=kind, captions=captions)
    assert report.images == 2 and report.unused == [NAMES[2]]
    file = open_regions(place(tmp_path, "shards"))
    assert {name: file[name].features[0, 0] for name in file} == {
        f"COCO_{int(name):012d}.jpg": regions(n).features[0, 0] for n, name in enumerate(NAMES[:2])
    }


def test_an_image_that_the_writer_lost_is_noticed(tmp_path, monkeypatch):
    layout = replace(FORMATS["shards"][1], write=lambda path, given_, *, split: len(list(given_)) - 1)
    monkeypatch.setattr(importlib.import_module("coder_plugin.data.regions.shards"), "SHARDS", layout)
    message = fault(quietly, written(tmp_path), place(tmp_path / "to", "shards"))
    assert "2 images were written of 3 read and 0 left out" in message
