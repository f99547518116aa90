"""Which files a server opens: those that an index names, inside allowed folders, and pictures alone."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from coder_plugin.data.decode import FORMATS
from coder_plugin.serve import originals as module
from coder_plugin.serve.originals import Originals, recorded_folders


class Record(NamedTuple):
    key: str
    path: str | None = None
    member: str | None = None


def picture(kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (5, 3), "red").save(file, kind)
    return file.getvalue()


def write(root: Path) -> Path:
    """``inside`` may be opened, ``outside`` not."""
    inside, outside = root / "inside", root / "outside"
    for each in (inside / "deep", outside):
        each.mkdir(parents=True)
        (each / "a.png").write_bytes(picture())
    (inside / "notes.png").write_text("root:x:0:0")
    (inside / "drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    (inside / "link.png").symlink_to(inside / "deep" / "a.png")
    (inside / "out.png").symlink_to(outside / "a.png")
    (inside / "away").symlink_to(outside)
    (inside / "loop.png").symlink_to("loop.png")
    os.mkfifo(inside / "pipe.png")
    with tarfile.open(inside / "shard.tar", "w") as tar:
        for name, content in {"x.txt": b"a caption", "x.jpg": picture("JPEG"), "deep/y.png": picture()}.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    with tarfile.open(inside / "small.tar.gz", "w:gz") as tar:
        tar.add(inside / "deep" / "a.png", "a.png")
    (inside / "torn.tar").write_bytes((inside / "shard.tar").read_bytes()[:1900])
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("originals"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """To change."""
    return write(tmp_path)


def content(folder: Path, record: Any) -> bytes | None:
    found = Originals([folder / "inside"]).open(record)
    return None if found is None else b"".join(found.chunks())


@pytest.mark.parametrize(
    "record",
    [
        lambda folder: Record("deep/a.png"),
        lambda folder: Record("./deep/../deep/a.png"),
        lambda folder: Record("link.png"),
        lambda folder: Record(str(folder / "inside" / "deep" / "a.png")),
        lambda folder: Record("any key", str(folder / "inside" / "deep" / "a.png")),
        lambda folder: Record("any key", f"file:{folder}/inside/deep/a.png"),
        lambda folder: Record("any key", str(folder / "inside" / "shard.tar"), "deep/y.png"),
    ],
)
def test_a_picture_inside_is_opened(folder: Path, record: Callable[[Path], Record]) -> None:
    assert content(folder, record(folder)) == picture()


@pytest.mark.parametrize(
    "record",
    [
        lambda folder: Record("../outside/a.png"),
        lambda folder: Record("deep/../../outside/a.png"),
        lambda folder: Record(str(folder / "outside" / "a.png")),
        lambda folder: Record("deep/a.png", str(folder / "outside" / "a.png")),
        lambda folder: Record("any key", "deep/a.png"),  # a path that begins in the working directory
        lambda folder: Record("out.png"),
        lambda folder: Record("away/a.png"),
        lambda folder: Record("loop.png"),
        lambda folder: Record("pipe.png"),
        lambda folder: Record("deep"),
        lambda folder: Record(""),
        lambda folder: Record("notes.png"),
        lambda folder: Record("drawing.svg"),
        lambda folder: Record("nowhere.png"),
        lambda folder: Record("deep/a.png\0.jpg"),
        lambda folder: Record("a" * 5000),
        lambda folder: Record("/etc/passwd"),
        lambda folder: Record("any key", "https://example.org/a.png"),
        lambda folder: Record("any key", f"pipe:cat {folder}/inside/deep/a.png"),
        lambda folder: Record("any key", str(folder / "inside" / "shard.tar")),
        lambda folder: Record("any key", str(folder / "inside" / "shard.tar"), "x.txt"),
        lambda folder: Record("any key", str(folder / "inside" / "shard.tar"), "nowhere.jpg"),
        lambda folder: Record("any key", str(folder / "inside" / "small.tar.gz"), "a.png"),
        lambda folder: Record("any key", str(folder / "inside" / "torn.tar"), "x.jpg"),
        lambda folder: Record("any key", str(folder / "inside" / "deep" / "a.png"), "a.png"),
    ],
)
def test_anything_else_is_not_opened(folder: Path, record: Callable[[Path], Record]) -> None:
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert content(folder, record(folder)) is None
    assert not files or len(os.listdir("/proc/self/fd")) <= files


def test_types_are_those_of_the_content(own: Path) -> None:
    types = {}
    for kind in FORMATS:
        (own / "inside" / "picture.html").write_bytes(picture(kind))
        found = Originals([own / "inside"]).open(Record("picture.html"))
        assert found is not None and b"".join(found.chunks()) == picture(kind) and found.file.closed
        types[kind] = found.media_type
    assert types == {kind: f"image/{kind.lower()}" for kind in FORMATS}
    (own / "inside" / "picture.html").write_bytes(b"BM is no picture but a text")
    assert content(own, Record("picture.html")) is None


def test_a_picture_may_be_too_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_FILE", len(picture()) - 1)
    assert content(folder, Record("deep/a.png")) is None
    monkeypatch.setattr(module, "LARGEST_FILE", len(picture()))
    monkeypatch.setattr(module, "CHUNK", 7)
    assert content(folder, Record("deep/a.png")) == picture()


def test_a_tar_file_that_changes_is_read_again(own: Path) -> None:
    shard = own / "inside" / "shard.tar"
    assert content(own, Record("", str(shard), "deep/y.png")) == picture()
    with tarfile.open(shard, "w") as tar:
        tar.add(own / "inside" / "deep" / "a.png", "deep/y.png")
    os.utime(shard, ns=(1, 1))
    assert content(own, Record("", str(shard), "deep/y.png")) == picture()


@pytest.mark.parametrize(
    ("plan", "folders"),
    [
        ({"data": "{0}/inside"}, ["{0}/inside"]),
        ({"data": "{0}/inside/shard.tar"}, ["{0}/inside"]),
        ({"data": "{0}/inside/{{0..9}}.tar"}, ["{0}/inside/"]),
        ({"data": "{0}/inside/*.tar::{0}/outside/x[0-9].tar"}, ["{0}/inside/", "{0}/outside"]),
        ({"data": "{0}/all.csv", "image_root": "{0}/inside"}, ["{0}", "{0}/inside"]),
        ({"data": "{0}/nowhere/all.csv"}, []),
        ({"data": "/all.csv", "image_root": "/"}, []),
        ({"data": "s3://bucket/{{0..9}}.tar", "image_root": None}, []),
        ({"data": "pipe:cat /usr/x.tar"}, []),
        ({"data": "scenes", "image_root": 3}, []),
        ({}, []),
    ],
)
def test_the_folders_that_an_index_records(folder: Path, plan: dict[str, Any], folders: list[str]) -> None:
    plan = {name: value.format(folder) if isinstance(value, str) else value for name, value in plan.items()}
    assert recorded_folders({"plan": plan}) == [each.format(folder) for each in folders]
