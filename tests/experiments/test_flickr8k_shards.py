"""Flickr8k as shards: the order of the pictures, and what the readers make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from coder_plugin.data import open_source


def write_karpathy(folder: Path, names: dict[str, list[str]]) -> tuple[Path, Path]:
    """A file of splits, and pictures whose colour says which one they are."""
    images = []
    (folder / "pictures").mkdir()
    for number, (split, name) in enumerate((split, name) for split, own in names.items() for name in own):
        Image.new("RGB", (50, 30), (20 * number, 0, 0)).save(folder / "pictures" / name)
        images.append({"filename": name, "split": split, "sentences": [{"raw": f"{name} \n one"}, {"raw": f"{name} two"}]})
    (folder / "dataset.json").write_text(json.dumps({"images": images}))
    return folder / "dataset.json", folder / "pictures"


def test_each_split_is_in_the_order_of_its_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k_shards

    monkeypatch.setattr(flickr8k_shards, "SIZE", 2)
    names = {"test": ["a.jpg"], "train": ["c.jpg", "b.jpg", "e.jpg"], "val": ["d.jpg"]}
    counts = flickr8k_shards.write_shards(*write_karpathy(tmp_path, names), tmp_path / "shards", side=16)
    assert counts == {"train": 3, "val": 1, "test": 1}
    written = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert written == ["test-000000.tar", "train-000000.tar", "train-000001.tar", "val-000000.tar"]
    first = [item for _, item in open_source(str(tmp_path / "shards" / "train-000000.tar"), split="train").items()]
    rest = [item for _, item in open_source(str(tmp_path / "shards" / "train-000001.tar"), split="train").items()]
    assert [item.captions[0] for item in (*first, *rest)] == ["b.jpg one", "c.jpg one", "e.jpg one"]
    assert [item.captions[1] for item in (*first, *rest)] == ["b.jpg two", "c.jpg two", "e.jpg two"]
    picture = first[0].load()
    assert picture.size == (16, 16) and abs(picture.getpixel((8, 8))[0] - 40) < 8  # b.jpg is the third picture of the file
    keys = [item.key for item in (*first, *rest)]
    test = [item for _, item in open_source(str(tmp_path / "shards" / "test-000000.tar"), split="val").items()]
    assert keys == ["0", "1", "2"] and test[0].key == "4"  # no two splits share one


def test_a_missing_picture_is_named(tmp_path: Path) -> None:
    import flickr8k_shards

    dataset, pictures = write_karpathy(tmp_path, {"train": ["a.jpg", "b.jpg"]})
    (pictures / "b.jpg").unlink()
    with pytest.raises(SystemExit, match=r"1 of 2 pictures are not in .*pictures, the first is b.jpg"):
        flickr8k_shards.write_shards(dataset, pictures, tmp_path / "shards")
    assert not (tmp_path / "shards").exists()
