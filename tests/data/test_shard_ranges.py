"""Local shards are read by places: each process reads its own samples, and a resumed epoch those that are left."""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin.data import tar_index, tars
from coder_plugin.data.item import Item
from coder_plugin.data.loader import epoch_order
from coder_plugin.data.shards import LocalShards, open_shards
from coder_plugin.data.tar_index import Place, read_sample, scan, scan_all
from coder_plugin.errors import CoderError

SIZE = 40_000


def write(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT, mode: str = "w") -> str:
    with tarfile.open(path, mode, format=form) as tar:  # type: ignore[call-overload]
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def samples(start: int, stop: int, captions: int = 1) -> list[tuple[str, bytes]]:
    members = []
    for n in range(start, stop):
        note = json.dumps({"captions": [f"{n} {k}" for k in range(captions)]}).encode()
        members += [(f"{n:04d}.jpg", bytes([n % 256]) * SIZE), (f"{n:04d}.json", note), (f"{n:04d}.npy", b"x" * 3000)]
    return members


def write_set(folder: Path, sizes: tuple[int, ...] = (13, 7, 12, 11), **options: Any) -> LocalShards:
    ends = list(itertools.accumulate(sizes))
    for shard, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        write(folder / f"s{shard}.tar", samples(end - size, end, **options))
    return open_shards(str(folder / "s*.tar"))


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read from a shard's file."""
    counted: list[int] = []

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            number = super().readinto(buffer)
            counted.append(number or 0)
            return number

        def read(self, size: int = -1) -> bytes | None:
            content = super().read(size)
            counted.append(len(content or b""))
            return content

    def open_local(shard: str) -> io.BufferedReader:
        return io.BufferedReader(Counting(tars.local_path(shard)), 512)

    def pread(*place: int) -> bytes:
        content = read(*place)
        counted.append(len(content))
        return content

    read = os.pread
    monkeypatch.setattr(tars, "open_local", open_local)
    monkeypatch.setattr(os, "pread", pread)
    return counted


def content(item: Item) -> bytes:
    """The stored content of an item's picture."""
    image = item.load.args[1]  # type: ignore[attr-defined]
    return image.read() if isinstance(image, Place) else image


# who reads what


@pytest.mark.parametrize("parts", [1, 4, 16])
def test_parts_read_everything_once(tmp_path, bytes_read, parts):
    data = write_set(tmp_path)
    total = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    assert data.num_images == 43 and sum(bytes_read) < 0.15 * total  # headers
    bytes_read.clear()
    seen = {}
    for part in range(parts):
        before = sum(bytes_read)
        mine = {index: content(data.item(index))[0] for index in range(part, 43, parts)}
        assert sum(bytes_read) - before <= len(mine) * (SIZE + 6000)
        seen.update(mine)
    assert seen == {n: n for n in range(43)}


def test_the_order_stays_within_windows_of_shards():
    groups = [20] * 2000
    order = epoch_order(groups, seed=3, epoch=0)
    assert sorted(order) == list(range(40_000))
    windows = [set((order[start : start + 2000] // 20).tolist()) for start in range(0, 40_000, 2000)]
    assert all(len(window) == 100 for window in windows)  # 2,000 samples of whole shards
    assert len(set(order[:40] // 20)) > 20  # mixed within the window
    large = epoch_order([1000] * 40, seed=3, epoch=0)
    assert len(set((large[:16_000] // 1000).tolist())) == 16
    assert not np.array_equal(order, epoch_order(groups, seed=3, epoch=1))
    assert not np.array_equal(order, epoch_order(groups, seed=4, epoch=0))


# places that are kept


def test_places_are_kept_and_made_again_when_a_shard_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tar_index, "_WORTH_KEEPING", 0)
    data = write_set(tmp_path)
    first = scan_all(data.shards)
    (kept,) = (tmp_path / "cache/coder_plugin").iterdir()
    scanned = []
    monkeypatch.setattr(tar_index, "scan", lambda shard: (scanned.append(shard), scan(shard))[1])
    again = scan_all(data.shards)
    assert not scanned and [index.starts.tolist() for index in again] == [index.starts.tolist() for index in first]
    assert [vars(index.files) for index in again] == [vars(index.files) for index in first]
    assert [index.changed for index in again] == [index.changed for index in first]
    status = os.stat(data.shards[1])
    os.utime(data.shards[1], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    scan_all(data.shards)
    assert scanned == data.shards
    kept.write_bytes(b"PK\3\4 damaged")
    os.utime(data.shards[1], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert [len(index) for index in scan_all(data.shards)] == [13, 7, 12, 11] and len(scanned) == 8


def test_the_places_that_were_used_last_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tar_index, "_WORTH_KEEPING", 0)
    monkeypatch.setattr(tar_index, "_MOST_KEPT", 2)
    first, second, third = ([shard] for shard in write_set(tmp_path).shards[:3])
    folder, files = tmp_path / "cache/coder_plugin", []
    for shards in (first, second):
        scan_all(shards)
        files += [path for path in folder.iterdir() if path not in files]
        os.utime(files[-1], ns=(len(files), len(files)))
    (folder / "other").touch()
    scan_all(first)
    scan_all(third)
    assert files[0].exists() and not files[1].exists() and len(list(folder.iterdir())) == 3


def test_a_quick_scan_leaves_no_file_and_a_folder_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    data = write_set(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scan_all(data.shards)
    assert not (tmp_path / "cache").exists()
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(tar_index, "_WORTH_KEEPING", 0)
    assert len(scan_all(data.shards)) == 4


# the same samples as by reading on


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", "d/e", "__note__", "__x__/a", "n" * 120, "\u00fc" * 60]),
            st.sampled_from(["png", "JPG", "txt", "json", "npy", "cls", "npz"]),
        ),
        max_size=14,
    ),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_places_give_the_samples_of_the_stream(names, form):
    contents = {"json": b'{"captions": ["one", "two"]}'}
    names = [("first", "png"), ("first", "txt"), *names]
    members = [(f"{stem}.{ext}", contents.get(ext, f"{n} {stem}".encode())) for n, (stem, ext) in enumerate(names)]
    with tempfile.TemporaryDirectory() as folder:
        shard = write(Path(folder) / "s.tar", members, form)
        write(Path(folder) / "s.tar.gz", members, form, "w:gz")

        def read(spec: str) -> list[Any]:
            return [(i, item.key, item.captions, item.fault is None, image(item)) for i, item in open_shards(spec).items()]

        def image(item: Item) -> Any:
            return None if item.fault is not None else (item.load.args[0], content(item))  # type: ignore[attr-defined]

        expected = read(f"pipe:cat {shard}")
        assert read(shard) == expected and read(f"{shard}.gz") == expected
        assert len(scan(shard)) == len(expected)
        index = scan(shard)
        backwards = [read_sample(shard, index, n).key for n in reversed(range(len(expected)))]
        assert backwards[::-1] == [read_sample(shard, index, n).key for n in range(len(expected))]


@pytest.mark.parametrize("change", ["half", "moved", "empty", "other", "same size"])
def test_a_shard_that_changes_after_its_headers_were_read_is_an_error(tmp_path, change):
    data = write_set(tmp_path, (6,))
    items = [item for _, item in data.items()]
    path = tmp_path / "s0.tar"
    whole, status = path.read_bytes(), os.stat(path)
    changed = {"half": whole[: len(whole) // 2], "moved": whole[512:], "empty": b"", "other": write_other(tmp_path)}
    path.write_bytes(changed.get(change, whole))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + (change == "same size")))
    for read in (lambda: data.item(3), lambda: items[5].load()):
        with pytest.raises(CoderError, match="s0.tar' cannot be read: ") as caught:
            read()
        assert "\n" not in str(caught.value)
        if change == "same size":
            assert "it has changed since its headers were read" in str(caught.value)
        elif change == "moved":
            break  # what is in a picture's place does not tell


def write_other(folder: Path) -> bytes:
    return Path(write(folder / "other", [("x.txt", b"y" * 500)] * 40)).read_bytes()


def test_few_shards_are_open_at_a_time(tmp_path):
    shards = [write(tmp_path / f"{n}.tar", samples(n, n + 1)) for n in range(tar_index.MOST_OPEN + 6)]
    data = open_shards(str(tmp_path / "*.tar"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert len({data.item(n).captions for n in range(len(shards))}) == len(shards)
        assert len(os.listdir("/proc/self/fd")) <= before + tar_index.MOST_OPEN
