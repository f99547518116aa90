"""Conversion between all formats of regions, and captions joined to regions by the images' names."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from coder_plugin import registry
from coder_plugin.data.item import Item
from coder_plugin.data.regions import guess_format, open_regions
from coder_plugin.data.regions.base import Record, RegionFormat, Regions
from coder_plugin.data.regions.convert import convert
from coder_plugin.data.regions.join import RegionSource
from coder_plugin.data.shards import open_shards
from coder_plugin.data.source import ItemSource, Plan
from coder_plugin.errors import CoderError

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
EXTRAS = set(FORMATS) - {"bua", "precomp"}


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
    FORMATS[kind][1].write(path, found, split="train")
    return path


def captioned(*keys: str, names=(), name="captions") -> ItemSource:
    return ItemSource([Item(key, (f"of {key}", "two"), None, tuple(names)) for key in keys], name=name)


def fault(call, *args, **options) -> str:
    with pytest.raises(CoderError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def quietly(*args, **options):
    return convert(*args, progress=False, **options)


@pytest.mark.parametrize("one, other", list(product(FORMATS, FORMATS)))
def test_every_format_becomes_every_other(tmp_path, one, other):
    source, destination = written(tmp_path / "from", one), place(tmp_path / "to", other)
    kinds = {"from_kind": one, "to_kind": other}
    if other == "lxmert" and one not in EXTRAS:
        assert "objects_id" in fault(quietly, source, destination, **kinds)
        return
    if other == "bua" and one in EXTRAS:
        assert "without extras" in fault(quietly, source, destination, **kinds) and not os.path.exists(destination)
    report = quietly(source, destination, **kinds, extras=other != "bua")
    assert report.images == 3 and (report.from_kind, report.to_kind) == (one, other)
    before, after = open_regions(source, one), open_regions(destination, other)
    assert set(after) == set(before) == set(NAMES)
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
    report = quietly(source, destination := place(tmp_path / "to", back), to_split="dev")
    assert report.captions == 6
    assert open_regions(destination, split="dev").captions == {each.name: each.captions for each in records(2)}


def test_captions_joined_in_set_the_order_and_the_names(tmp_path):
    keys = [f"val2014/COCO_val2014_{int(name):012d}.jpg" for name in reversed(NAMES)]
    report = quietly(written(tmp_path), place(tmp_path, "shards"), captions=captioned(*keys[:2]))
    assert report.images == 2 and report.captions == 4 and report.missing == () and report.unused == (NAMES[0],)
    assert "1 images with regions but no captions" in str(report) and NAMES[0] in str(report)
    file = open_regions(place(tmp_path, "shards"))
    assert list(file) == keys[:2]
    assert np.array_equal(file[keys[0]].features, regions(2).features)
    assert file.captions[keys[1]] == (f"of {keys[1]}", "two")


def test_unused_ones_are_told_by_the_name_they_are_listed_by(tmp_path):
    source = written(tmp_path)
    mapping = {name: f"val2014/COCO_{name}.jpg" for name in NAMES}
    (tmp_path / "x_precomp/id_mapping.json").write_text(str(mapping).replace("'", '"'))
    report = quietly(source, place(tmp_path, "shards"), captions=captioned(*NAMES[:2]))
    assert report.unused == (mapping[NAMES[2]],)


def test_captions_from_shards_and_cut_to_a_number(tmp_path):
    captions = open_shards(written(tmp_path / "c", "shards", captions=3) + "/train-*.tar")
    report = quietly(written(tmp_path), place(tmp_path, "shards"), captions=captions, captions_per_image=2)
    assert report.captions == 6
    assert open_regions(place(tmp_path, "shards")).captions[NAMES[1]] == ("1 0", "1 1")


def test_captioned_images_without_regions(tmp_path):
    source, destination = written(tmp_path), place(tmp_path, "shards")
    captions = captioned(*NAMES, "7", "8")
    message = fault(quietly, source, destination, captions=captions)
    assert "2 of 5 images of captions have no regions" in message and "'7', '8'" in message
    assert not os.path.exists(destination)
    report = quietly(source, destination, captions=captions, missing_ok=True)
    assert report.images == 3 and report.missing == ("7", "8") and "'7', '8'" in str(report)


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
    for mode, epoch in product(("draw", "all"), range(3)):
        plan = Plan(seed=1, epoch=epoch, batch_size=2, captions=mode)
        ours, theirs = list(source.chunks(plan)), list(captions.chunks(plan))
        assert [[(i.key, i.captions) for i in c] for c in ours] == [[(i.key, i.captions) for i in c] for c in theirs]
    for number, (index, item) in enumerate(source.items()):
        assert index == number and np.array_equal(item.load().features, regions(number).features)
    assert [index for index, _ in source.items(1, 2)] == [1]


def test_a_joined_source_goes_to_workers(tmp_path):
    source = pickle.loads(pickle.dumps(joined(written(tmp_path), captioned(*NAMES))))
    items = [item for _, item in pickle.loads(pickle.dumps(list(source.items())))]
    assert np.array_equal(items[2].load().features, regions(2).features)


@pytest.mark.parametrize(
    "key, names", [("x", NAMES[:1]), ("x.jpg", ("y", f"val/C_{NAMES[0]}.png")), (f"{NAMES[0]}.jpg", ())]
)
def test_names_that_are_looked_for(tmp_path, key, names):
    source = joined(written(tmp_path), captioned(key, names=names))
    assert np.array_equal(next(source.items())[1].load().features, regions(0).features)


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
        source = joined(path, captioned(*NAMES, "7", "8", "9", "10"), max_missing=4)
    assert "4 of 7 images have no regions, such as '7', '8', '9' and 1 more" in caplog.text
    with pytest.raises(ValueError, match="'7'"):
        [item for _, item in source.items()][3].load()
    assert "at most 3 may" in fault(joined, path, captioned(*NAMES, "7", "8", "9", "10"), max_missing=3)


def test_captions_that_come_as_a_stream(tmp_path):
    stream = open_shards(written(tmp_path / "c", "shards", captions=2) + "/train-*.tar")
    source = RegionSource(stream, open_regions(written(tmp_path)))
    chunks = list(source.chunks(Plan(seed=1, epoch=0, batch_size=3)))
    assert {item.key for item in chunks[0]} == set(NAMES)
    for _, item in source.items():
        assert np.array_equal(item.load().features, regions(NAMES.index(item.key)).features)
    missing = RegionSource(stream, {"7": regions(0)})
    with pytest.raises(ValueError, match="not in the file of regions"):
        next(missing.items())[1].load()


@pytest.mark.parametrize("kind", FORMATS)
def test_what_a_format_wrote_is_guessed(tmp_path, kind):
    path = written(tmp_path, kind)
    if kind in ("bua", "lxmert"):
        assert guess_format(path) in ("bua", "lxmert")
    else:
        assert guess_format(path) == kind
