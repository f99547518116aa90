"""Local shards are read by places: each part reads its own samples, and a resumed epoch those that are left."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coder_plugin.data import tar_index, tars
from coder_plugin.data.item import Item
from coder_plugin.data.loader import TrainLoader
from coder_plugin.data.shards import ShardSource, open_shards
from coder_plugin.data.source import Plan
from coder_plugin.data.tar_index import Place, TarReader, scan
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


def write_set(folder: Path, sizes: tuple[int, ...] = (13, 7, 12, 11), **options: Any) -> ShardSource:
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

    for module in (tars, tar_index):
        monkeypatch.setattr(module, "open_local", open_local)
    return counted


@pytest.fixture
def samples_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of samples whose pictures were read, in the order of reading."""
    keys: list[str] = []
    real, real_place = TarReader.read, Place.read

    def read(self: TarReader, number: int, *, images: bool = True) -> dict[str, Any]:
        sample = real(self, number, images=images)
        if images:
            keys.append(sample["__key__"])
        return sample

    def read_place(self: Place) -> bytes:
        content = real_place(self)
        keys.append(f"{content[0]:04d}")
        return content

    monkeypatch.setattr(TarReader, "read", read)
    monkeypatch.setattr(Place, "read", read_place)
    return keys


def content(item: Item) -> bytes:
    """The stored content of an item's picture."""
    image = item.load.args[1]  # type: ignore[attr-defined]
    return image.read() if isinstance(image, Place) else image


def plan(**options: Any) -> Plan:
    return Plan(**{"seed": 3, "epoch": 0, "batch_size": 4, "shuffle_buffer": 8, **options})


# who reads what


@pytest.mark.parametrize("parts", [1, 4, 16])
def test_parts_of_an_evaluation_read_everything_once(tmp_path, bytes_read, samples_read, parts):
    data = write_set(tmp_path)
    total = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    data.prepare()
    assert sum(bytes_read) < 0.15 * total  # headers
    bytes_read.clear()
    seen = {}
    for part in range(parts):
        before = sum(bytes_read)
        mine = {index: content(item)[0] for index, item in data.items(part, parts, block=2)}
        assert all(index // 2 % parts == part for index in mine)
        assert sum(bytes_read) - before <= len(mine) * (SIZE + 6000)
        seen.update(mine)
    assert seen == {n: n for n in range(43)} and Counter(samples_read) == Counter(f"{n:04d}" for n in range(43))


def test_captions_alone_are_read_without_pictures(tmp_path, bytes_read):
    data = write_set(tmp_path)
    assert len({item.captions for _, item in data.items()}) == 43
    assert data.samples("all") == 43
    assert sum(bytes_read) < 0.3 * 43 * SIZE


@pytest.mark.parametrize("sizes", [(43,), (13, 7, 12, 11)])
def test_parts_of_training_read_everything_once(tmp_path, bytes_read, samples_read, sizes):
    data = write_set(tmp_path, sizes)
    data.prepare()
    bytes_read.clear()
    for rank, worker in itertools.product(range(2), range(3)):
        before = sum(bytes_read)
        mine = [item for chunk in data.chunks(plan(rank=rank, world_size=2, worker=worker, workers=3)) for item in chunk]
        assert 5 <= len(mine) <= 9 and sum(bytes_read) - before <= len(mine) * (SIZE + 6000)
    assert Counter(samples_read) == Counter(f"{n:04d}" for n in range(43))


def test_a_part_reads_on_in_the_order_of_the_shards(tmp_path, samples_read):
    """Not in the shuffled order, which would seek for every sample."""
    data = write_set(tmp_path, (43,))
    drawn = [item.captions[0].split()[0] for chunk in data.chunks(plan()) for item in chunk]
    assert samples_read == [f"{n:04d}" for n in range(43)] and drawn != sorted(drawn, key=int)


# resuming


@pytest.mark.parametrize("captions", ["draw", "all"])
@pytest.mark.parametrize("skip", [1, 5, 9])
def test_skipped_chunks_are_not_read(tmp_path, samples_read, bytes_read, captions, skip):
    data = write_set(tmp_path, captions=3)
    data.samples(captions)
    whole = [[(item.key, item.captions) for item in chunk] for chunk in data.chunks(plan(captions=captions))]
    samples_read.clear()
    bytes_read.clear()
    left = [[(item.key, item.captions) for item in chunk] for chunk in data.chunks(plan(captions=captions, skip=skip))]
    assert left == whole[skip:]
    needed = {key.partition("/")[2] for chunk in left for key, _ in chunk}
    assert set(samples_read) == needed
    if captions == "draw":
        assert len(samples_read) == len(needed) == 43 - 4 * skip
        assert sum(bytes_read) <= len(needed) * (SIZE + 6000)
        order = {f"{n:04d}": n for n in range(43)}
        shards = [[order[key] for key in group] for _, group in itertools.groupby(samples_read, key=shard_of)]
        assert all(group == sorted(group) for group in shards)  # read on, not to and fro


def shard_of(key: str) -> int:
    return sum(int(key) >= end for end in (13, 20, 32))


def test_captions_that_were_not_counted_are_counted_where_they_are_skipped(tmp_path, samples_read):
    data = write_set(tmp_path, captions=3)
    whole = [[item.captions for item in chunk] for chunk in data.chunks(plan(captions="all"))]
    samples_read.clear()
    fresh = open_shards(str(tmp_path / "s*.tar"))
    assert [[item.captions for item in chunk] for chunk in fresh.chunks(plan(captions="all", skip=20))] == whole[20:]
    assert 0 < len(set(samples_read)) < 35


def transform(image: bytes) -> torch.Tensor:
    return torch.tensor([image[0]])


def tokenizer(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[int(n) for n in text.split()] for text in texts])


def take(source: ShardSource, position: Any, steps: int, **options: Any) -> tuple[list[int], Any]:
    """The samples of at most ``steps`` steps of all ranks, and the ranks' positions."""
    given = {"batch_size": 4, "seed": 7, "shuffle_buffer": 8, "transform": transform, "tokenizer": tokenizer, **options}
    ranks = [TrainLoader(source, rank=rank, **given) for rank in range(options.get("world_size", 1))]
    streams = [made.epoch(2, position) for made in ranks]
    taken: list[int] = []
    positions = None
    for _ in range(steps):
        batches = [next(stream, None) for stream in streams]
        if any(batch is None for batch in batches):
            break
        taken += [n for batch in batches for n in batch["text"][:, 0].tolist()]
        positions = [made.position() for made in ranks]
    for stream in streams:
        stream.close()
    return taken, json.loads(json.dumps(positions))


@pytest.mark.parametrize(
    "then, now", [({"world_size": 2}, {"world_size": 1}), ({}, {"world_size": 2}), ({}, {"batch_size": 3})]
)
def test_other_ranks_read_only_what_is_left_and_once(tmp_path, samples_read, monkeypatch, then, now):
    from coder_plugin.data import shards

    monkeypatch.setattr(shards, "decode_image", lambda image, **_: image)
    data = write_set(tmp_path, (15, 9, 12, 12))
    used, positions = take(data, None, 3, **then)
    samples_read.clear()
    left, _ = take(data, positions, 99, **now)
    assert not set(used) & set(left) and len(set(left)) == len(left) and 48 - len(used) - len(left) < 16
    assert not set(samples_read) & {f"{n:04d}" for n in used}
    assert max(Counter(samples_read).values()) == 1 and len(samples_read) <= 48 - len(used)


# the same samples as by reading on


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", "d/e", "__note__", "__x__/a", "n" * 120, "\u00fc" * 60]),
            st.sampled_from(["png", "JPG", "txt", "json", "npy", "cls", "npz"]),
        ),
        max_size=14,
    ),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.booleans(),
)
def test_places_give_the_samples_of_the_stream(names, form, regions):
    file = io.BytesIO()
    np.savez(file, **{"features" if regions else "other": np.ones((2, 3))})
    contents = {"json": b'{"captions": ["one", "two"]}', "npz": file.getvalue()}
    members = [(f"{stem}.{ext}", contents.get(ext, f"{n} {stem}".encode())) for n, (stem, ext) in enumerate(names)]
    with tempfile.TemporaryDirectory() as folder:
        shard = write(Path(folder) / "s.tar", members, form)
        write(Path(folder) / "s.tar.gz", members, form, "w:gz")

        def read(spec: str) -> list[Any]:
            return [(i, item.key, item.captions, str(item.fault), image(item)) for i, item in open_shards(spec).items()]

        def image(item: Item) -> Any:
            return None if item.fault is not None else (item.load.args[0], content(item))  # type: ignore[attr-defined]

        expected = read(f"pipe:cat {shard}")
        assert read(shard) == expected and read(f"{shard}.gz") == expected
        assert len(scan(shard)) == len(expected)
        if expected:
            one = TarReader(shard, scan(shard))
            backwards = [one.read(n)["__key__"] for n in reversed(range(len(expected)))]
            assert backwards[::-1] == [one.read(n)["__key__"] for n in range(len(expected))]


def test_a_compressed_shard_is_read_on_and_resumed(tmp_path):
    write(tmp_path / "s.tar.gz", samples(0, 20), mode="w:gz")
    data = open_shards(str(tmp_path / "s.tar.gz"))
    assert data.num_images == 20 and not scan(data.shards[0]).seekable
    whole = [[item.key for item in chunk] for chunk in data.chunks(plan())]
    assert [[item.key for item in chunk] for chunk in data.chunks(plan(skip=2))] == whole[2:]


def test_a_shard_that_changes_after_its_headers_were_read_is_an_error(tmp_path):
    data = write_set(tmp_path, (6,))
    items = [item for _, item in data.items()]
    path = tmp_path / "s0.tar"
    whole = path.read_bytes()
    for changed in (whole[: len(whole) // 2], whole[512:], b"", write_other(tmp_path)):
        path.write_bytes(changed)
        with pytest.raises(CoderError, match="s0.tar' cannot be read: ") as caught:
            list(data.chunks(plan()))
        assert "\n" not in str(caught.value)
    path.write_bytes(whole[:SIZE])
    with pytest.raises(CoderError, match="it has changed"):
        items[5].load()


def write_other(folder: Path) -> bytes:
    return Path(write(folder / "other", [("x.txt", b"y" * 500)] * 40)).read_bytes()


def test_few_shards_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_index, "MOST_OPEN", 3)
    shards = [write(tmp_path / f"{n}.tar", samples(n, n + 1)) for n in range(8)]
    readers = [TarReader(shard, scan(shard)) for shard in shards]
    for _ in range(2):
        assert [reader.read(0)["__key__"] for reader in readers] == [f"{n:04d}" for n in range(8)]
        assert sum(reader._tar is not None for reader in readers) == 3
