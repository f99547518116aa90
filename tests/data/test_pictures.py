"""A folder of pictures: read by ending or content, and what is not read is counted and named."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from coder_plugin.data import guess_kind
from coder_plugin.data.pictures import Pictures, is_pictures
from coder_plugin.errors import CoderError


def content(kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (9, 99, 200)).save(buffer, kind)
    return buffer.getvalue()


def write(folder: Path, *names: str, data: bytes | None = None) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content() if data is None else data)


def keys(folder: Path) -> list[str]:
    return [item.key for _, item in Pictures(str(folder)).items()]


def test_endings_and_contents(tmp_path, caplog):
    names = ["a.jpg", "b.jfif", "c.jpe", "d.avif", "e.JPG", "f", "sub/g.photo"]
    write(tmp_path, *names)
    assert keys(tmp_path) == sorted(names) and not caplog.records
    assert Pictures(str(tmp_path)).item(3).load().size == (4, 4)
    assert [index for index, _ in Pictures(str(tmp_path)).items()] == list(range(7))


def test_what_is_not_read_is_counted_and_named_once(tmp_path, caplog):
    folder = tmp_path / "pictures"
    write(folder, "a.jpg")
    write(folder, "b.heic", "sub/c.heic", "notes.txt", "README", data=b"\0\0\0\x18ftypheic")
    write(folder, "raw.nef", data=content("TIFF"))
    write(tmp_path / "elsewhere", "d.jpg")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "pipe.jpg")
    assert keys(folder) == ["a.jpg"]
    (record,) = caplog.records
    assert "left out 7 files that are no JPEG, PNG, WEBP, GIF, BMP, TIFF: without ending 2, " in record.getMessage()
    assert record.getMessage().endswith("; the first: 'README'")


def test_a_folder_without_pictures_says_what_it_holds(tmp_path):
    with pytest.raises(CoderError, match="no pictures .*; it holds nothing$"):
        Pictures(str(tmp_path))
    write(tmp_path, "train-0.tar", "train-1.tar", data=b"0")
    with pytest.raises(CoderError, match=r"it holds .tar 2; the first: 'train-0.tar'; for shards, give '.*/\*.tar'"):
        Pictures(str(tmp_path))


def test_which_folders_are_pictures(tmp_path):
    write(tmp_path / "a", "1.jpe")
    assert is_pictures(str(tmp_path / "a")) and not is_pictures(str(tmp_path / "none"))
    with pytest.raises(CoderError, match="a folder of pictures without captions"):
        guess_kind(str(tmp_path / "a"))
    write(tmp_path / "a", "metadata.csv", data=b"file_name,text\n")
    assert not is_pictures(str(tmp_path / "a"))
