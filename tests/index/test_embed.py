"""Embedding into Parquet files: what is in them, kills, several processes, and how often the data are read."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import pickle
import signal
import tarfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.cli.embed import share_of
from coder_plugin.data import open_source, tars
from coder_plugin.data.item import Item
from coder_plugin.data.pictures import Pictures
from coder_plugin.data.source import ItemSource
from coder_plugin.data.units import Units
from coder_plugin.errors import CoderError
from coder_plugin.index import claims, embed
from coder_plugin.index.claims import Claims
from coder_plugin.index.embed import Embedding, as_type, begin, embed_all, embed_unit, open_folder
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.job import EmbedJob
from coder_plugin.index.unit_file import UnitSummary, image_vectors, text_vectors, write_unit
from coder_plugin.pretrained.encode import Encoder
from coder_plugin.pretrained.export import export_model
from tests import fresh
from tests.data.test_remote_shards import Handler
from tests.evaluation.test_evaluate import make_encoder
from tests.training import region_data

MODEL = {"name": "x", "fingerprint": "f" * 64}
ITEM = Item("a", ("a dog",), lambda: Image.new("RGB", (8, 8)))


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """24 images of five captions, read as regions, for a model that re-ranks."""
    return region_data.write_precomp(tmp_path_factory.mktemp("regions"))


def embedding_of(data: str, rows: int = 10, **options: Any) -> Embedding:
    encoder, source = make_encoder(data)
    return Embedding(encoder=encoder, units=Units(source, rows), **options)


def make(folder: Path, embedding: Embedding, *, index: int = 0, count: int = 1, **options: Any) -> embed.Finished:
    header = begin(folder, embedding, model=MODEL, plan={}, first=index, **options)
    return embed_all(folder, embedding, header, index=index, count=count, shown=False)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


@pytest.fixture(scope="module")
def whole(regions: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "e"
    make(folder, embedding_of(regions, tokens=True))
    return folder


def write_shards(folder: Path, *, shards: int = 3, size: int = 4, side: int = 8, broken: int = -1) -> str:
    """Shards of pictures of noise with captions and json; one member in capitals."""
    rng = np.random.default_rng(0)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as tar:
            for n in range(shard * size, (shard + 1) * size):
                file = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(file, "PNG")
                fields = {"n": n, "source": "web" if n % 2 else "book", "ratio": n / 2, "safe": n > 3}
                ending = "PNG" if n == 1 else "png"
                picture = b"broken" if n == broken else file.getvalue()
                for name, data in ((ending, picture), ("txt", f"caption {n}".encode()), ("json", json.dumps(fields).encode())):
                    member = tarfile.TarInfo(f"{n:04d}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return str(folder / f"{{0000..{shards - 1:04d}}}.tar")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "export"
    export_model(coder_plugin.create_model("coder-tiny", loss="dcl"), folder)
    return str(folder)


class Mean:
    """A picture's mean colour in place of a model, for tests of what is read."""

    def __init__(self) -> None:
        self.coder = self

    def eval(self) -> None: ...

    def describe_image(self, image: torch.Tensor) -> torch.Tensor:
        return image.float().mean((2, 3))

    def describe_text(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.float()

    def embed(self, side: str, features: torch.Tensor) -> torch.Tensor:
        return features


def to_tensor(picture: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)


def to_lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption), 1, 2] for caption in captions])


def mean_encoder(**options: Any) -> Encoder:
    values = {"device": torch.device("cpu"), "batch_size": 3, "workers": 0, **options}
    return Encoder(Mean(), to_lengths, to_tensor, **values)


def test_the_files_hold_what_the_encoder_gives(regions: str, whole: Path) -> None:
    encoder, source = make_encoder(regions)
    encoded = encoder(source)
    embeddings = Embeddings(whole)
    assert (embeddings.units, embeddings.rows, embeddings.dimensions, embeddings.views) == (3, 24, 16, 1)
    assert [embeddings.summary(unit).rows for unit in range(3)] == [10, 10, 4]
    batches = [batch for unit in range(3) for batch in embeddings.batches(unit)]
    np.testing.assert_array_equal(np.concatenate([image_vectors(b, embeddings.header) for b in batches])[:, 0], encoded.images)
    np.testing.assert_array_equal(np.concatenate([text_vectors(b, embeddings.header) for b in batches]), encoded.texts)
    items = [item for _, item in source.items()]
    for name, values in {
        "key": [item.key for item in items],
        "image_id": [item.image_id for item in items],
        "captions": [list(item.captions) for item in items],
        "thumbnail": [None] * 24,
        "path": [None] * 24,
    }.items():
        assert [value for batch in batches for value in batch.column(name).to_pylist()] == values
    start = 0
    for unit in range(3):
        tokens, rows = embeddings.tokens(unit), embeddings.summary(unit).rows
        assert {*tokens} == {"image_tokens", "image_mask", "image_whole", "text_tokens", "text_mask"}
        for name in ("tokens", "mask", "whole"):
            np.testing.assert_array_equal(tokens[f"image_{name}"], encoded.items.images[name][start : start + rows])
        length = tokens["text_tokens"].shape[1]
        np.testing.assert_array_equal(
            tokens["text_tokens"], encoded.items.texts["tokens"][5 * start : 5 * (start + rows), :length]
        )
        start += rows


@pytest.mark.parametrize("what", ["images", "captions"])
def test_one_kind_of_vectors_in_half_precision(regions: str, whole: Path, tmp_path: Path, what: str) -> None:
    finished = make(tmp_path / "e", embedding_of(regions), what=what, dtype="float16")
    assert (finished.images, finished.captions, finished.made) == (24, 120, 3)
    column = {"images": "image_vector", "captions": "text_vectors"}[what]
    halves, full = Embeddings(tmp_path / "e").read(1), Embeddings(whole).read(1)
    assert {"image_vector", "text_vectors"} & {*halves.schema.names} == {column}
    expected = [np.float16(row).tolist() for row in full[column].to_pylist()]
    assert halves[column].to_pylist() == expected and halves["captions"].equals(full["captions"])
    assert Embeddings(tmp_path / "e").tokens(0) == {}


def test_captions_alone_load_no_image(regions: str, tmp_path: Path) -> None:
    def unread() -> Any:
        raise AssertionError

    encoder, source = make_encoder(regions)
    items = ItemSource([Item(item.key, item.captions, unread) for _, item in source.items()])
    assert make(tmp_path / "e", Embedding(encoder=encoder, units=Units(items, 10)), what="captions").captions == 120


def test_shards_one_file_each_with_places_and_fields(model: str, tmp_path: Path) -> None:
    data = write_shards(tmp_path, broken=6)
    columns = {"source": "string", "n": "int64", "ratio": "float64", "safe": "bool", "absent": "string"}
    named = [f"{name}:{kind}" for name, kind in columns.items()]
    command = ["embed", model, "--data", data, "--output", str(tmp_path / "e"), "--batch-size", "3", "--columns", *named]
    assert main([*command, "--workers", "2", "--thumbnails", "6"]) == 0
    embeddings = Embeddings(tmp_path / "e")
    assert embeddings.columns == columns and [embeddings.summary(unit).rows for unit in range(3)] == [4, 3, 4]
    assert embeddings.summary(1).bad == [("picture", "0001/0006")]
    rows = [row for unit in range(3) for row in embeddings.read(unit).to_pylist()]
    numbers = [n for n in range(12) if n != 6]
    assert [row["key"] for row in rows] == [f"{n // 4:04d}/{n:04d}" for n in numbers]
    assert [row["path"] for row in rows] == [str(tmp_path / f"{n // 4:04d}.tar") for n in numbers]
    assert [row["member"] for row in rows] == [f"{n:04d}.{'PNG' if n == 1 else 'png'}" for n in numbers]
    for row in rows:
        with tarfile.open(row["path"]) as tar:
            assert Image.open(tar.extractfile(row["member"])).size == (8, 8)
        assert Image.open(io.BytesIO(row["thumbnail"])).size == (6, 6)
    assert [[row[name] for name in columns] for row in rows] == [
        ["web" if n % 2 else "book", n, n / 2, n > 3, None] for n in numbers
    ]


def test_a_folder_of_pictures_and_a_table(model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pictures" / "in").mkdir(parents=True)
    for name in ("b.png", "in/a.png", "c.png"):
        Image.new("RGB", (8, 8), (len(name), 0, 0)).save(tmp_path / "pictures" / name)
    monkeypatch.chdir(tmp_path)
    command = ["embed", model, "--data", "pictures", "--rows-per-file", "2", "--output", "e", "--workers", "0"]
    assert main(command) == 0
    assert "embeddings e: 2 files, 3 images, 0 captions; vectors of 128 dimensions, float32" in capsys.readouterr().out
    rows = [row for unit in range(2) for row in Embeddings("e").read(unit).to_pylist()]
    assert [(row["key"], row["path"]) for row in rows] == [
        (name, str(tmp_path / "pictures" / name)) for name in ("b.png", "c.png", "in/a.png")
    ]
    before = content(Path("e"))
    assert main(command) == 0 and "e is already finished: 2 files of 3 images, nothing to do" in capsys.readouterr().out
    assert content(Path("e")) == before
    assert main([*command, "--dtype", "float16"]) == 2
    assert "e was begun with other options (dtype was float32, is float16)" in capsys.readouterr().err
    assert main([*command[:-4], "--output", "pictures"]) == 2
    assert "pictures holds no embeddings and is not empty (b.png, c.png, in): choose another folder" in capsys.readouterr().err
    table = "filepath\ttitle\tyear\tsource\nb.png\ta dog\t1999\t\npictures/c.png\ta cat\tlong ago\tweb\n"
    (tmp_path / "pictures" / "pairs.csv").write_text(table)
    named = ["--columns", "year:int64", "--columns", "source"]
    assert main(["embed", model, "--data", "pictures/pairs.csv", "--output", "t", "--workers", "0", *named]) == 0
    rows = Embeddings("t").read(0).to_pylist()
    assert [row["path"] for row in rows] == [str(tmp_path / "pictures" / name) for name in ("b.png", "c.png")]
    assert [(row["year"], row["source"]) for row in rows] == [(1999, None), (None, "web")]


# kills, torn files, several processes


def test_a_torn_file_is_made_again_and_no_other(regions: str, whole: Path, tmp_path: Path) -> None:
    folder, embedding = tmp_path / "e", embedding_of(regions, tokens=True)
    make(folder, embedding)
    before = content(folder)
    assert before == content(whole)
    second, third = folder / "00000001.parquet", folder / "00000002.tokens.safetensors"
    second.write_bytes(second.read_bytes()[:-100])
    third.unlink()
    assert make(folder, embedding).made == 2 and content(folder) == before
    (folder / "00000000.parquet").write_bytes(second.read_bytes())  # another unit's
    assert make(folder, embedding).made == 1 and content(folder) == before


class Killed(BaseException):
    pass


@pytest.mark.parametrize("stop", range(1, 10, 2))
def test_a_stop_at_any_block_changes_nothing(regions: str, whole: Path, tmp_path: Path, monkeypatch: Any, stop: int) -> None:
    real, calls = Embedding.rows, []

    def stopping(self: Any, block: Any, header: Any) -> Any:
        calls.append(block.unit)
        if len(calls) == stop:
            raise Killed
        return real(self, block, header)

    with monkeypatch.context() as patch:
        patch.setattr(Embedding, "rows", stopping)
        if stop <= 5:
            with pytest.raises(Killed):
                make(tmp_path / "e", embedding_of(regions, tokens=True))
        calls.clear()
        stop = 99
        make(tmp_path / "e", embedding_of(regions, tokens=True))
    assert content(tmp_path / "e") == content(whole)


def embed_and_wait(folder: str, data: str, stop: int, index: int, count: int, channel: Connection) -> None:
    """In a process of its own: before it encodes block ``stop``, it says so and waits."""
    real, calls = Embedding.rows, []

    def rows(self: Any, block: Any, header: Any) -> Any:
        calls.append(block.unit)
        if len(calls) == stop:
            channel.send("waiting")
            channel.recv()
        return real(self, block, header)

    Embedding.rows = rows  # type: ignore[method-assign]
    channel.send(make(Path(folder), embedding_of(data, tokens=True), index=index, count=count).made)


def start_child(folder: Path, data: str, stop: int, index: int = 0, count: int = 1) -> tuple[Any, Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = fresh.context().Process(target=embed_and_wait, args=(str(folder), data, stop, index, count, theirs))
    process.start()
    theirs.close()
    return process, ours


def test_a_second_process_helps_and_goes_on_after_a_kill(regions: str, whole: Path, tmp_path: Path) -> None:
    """The first, which waits in its second unit, is helped; it is killed, and its unit is made again."""
    folder = tmp_path / "e"
    child, channel = start_child(folder, regions, stop=3)
    try:
        assert channel.poll(60) and channel.recv() == "waiting"
        helped = make(folder, embedding_of(regions, tokens=True))
        assert (helped.made, helped.files, helped.others) == (1, 2, 1)  # the third; the second is locked
        assert make(folder, embedding_of(regions, tokens=True)).made == 0
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert make(folder, embedding_of(regions, tokens=True)).made == 1
    finally:
        child.kill()
    assert content(folder) == content(whole)


def test_two_writers_share_the_work(regions: str, whole: Path, tmp_path: Path) -> None:
    """Both have begun before either goes on, as ranks of a launcher."""
    folder = tmp_path / "e"
    children = [start_child(folder, regions, 1, index, 2) for index in range(2)]
    try:
        assert all(channel.poll(60) and channel.recv() == "waiting" for _, channel in children)
        for _, channel in children:
            channel.send("go")
        made = [channel.recv() for _, channel in children if channel.poll(60)]
    finally:
        for child, _ in children:
            child.kill()
    assert sum(made) == 3 and min(made) >= 1
    assert content(folder) == content(whole)


def test_units_of_a_process_that_ends_are_taken_over(regions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PATIENCE", 0.01)
    embedding = embedding_of(regions)
    header = begin(tmp_path / "e", embedding, model=MODEL, plan={})
    other = Claims(tmp_path / "e", header)
    assert next(iter(other)) == 0
    timer = threading.Timer(0.1, other.close)
    timer.start()
    finished = embed_all(tmp_path / "e", embedding, header, wait=True, shown=False)
    timer.join()
    assert (finished.made, finished.others, finished.images) == (3, 0, 24)
    assert not list((tmp_path / "e").glob(".0*"))  # no lock is left


def test_the_last_of_two_processes_counts_all_files(regions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has a unit when this one looks for work, and finishes it while the last is made here."""
    embedding = embedding_of(regions)
    header = begin(tmp_path / "e", embedding, model=MODEL, plan={})
    other = Claims(tmp_path / "e", header)
    unit, real = next(iter(other)), Embedding.rows
    path = tmp_path / "e" / header.file(unit)

    def rows(self: Embedding, block: Any, header: Any) -> Any:
        if block.unit == header.units - 1 and not path.exists():
            embed_unit(embedding, unit, path, header)
            other.close()
        return real(self, block, header)

    monkeypatch.setattr(Embedding, "rows", rows)
    finished = embed_all(tmp_path / "e", embedding, header, shown=False)
    assert (finished.made, finished.files, finished.others, finished.images) == (2, 3, 0, 24)


def test_without_locks_each_process_makes_its_own_share(regions: str, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def unsupported(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claims.fcntl, "flock", unsupported)
    assert [make(tmp_path / "e", embedding_of(regions), index=n, count=2).made for n in range(2)] == [2, 1]
    text = "files cannot be locked there ([Errno 37] No locks available): each process embeds its own share"
    assert caplog.text.count(text) == 2  # once a process
    Embeddings(tmp_path / "e")
    order = [3, 0, 1, 2]  # of more processes than units
    assert [make(tmp_path / "more", embedding_of(regions), index=n, count=4).made for n in order] == [0, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_decoding_processes_change_nothing(tmp_path: Path, workers: int) -> None:
    data = write_shards(tmp_path, shards=2, size=7, broken=5)
    folder = tmp_path / f"e{workers}"
    encoder = mean_encoder(workers=workers)
    finished = make(folder, Embedding(encoder=encoder, units=Units(open_source(data), 9)))
    assert (finished.made, finished.images, finished.bad) == (2, 13, {"picture": 1})
    if workers:
        make(tmp_path / "e0", Embedding(encoder=mean_encoder(), units=Units(open_source(data), 9)))
        assert content(folder) == content(tmp_path / "e0")
    embedding = Embedding(encoder=encoder, units=Units(open_source(data), 9))
    header = begin(folder, embedding, model=MODEL, plan={})
    embed_unit(embedding, 1, tmp_path / "one.parquet", header)
    assert (tmp_path / "one.parquet").read_bytes() == (folder / "00000001.parquet").read_bytes()


# how often the data are read


def share_among(folder: Path, parts: int, source: Any) -> list[embed.Finished]:
    """Embed by so many parts at once: threads, which have nothing in common but the folder."""
    finished: list[Any] = [None] * parts

    def part(index: int) -> None:
        embedding = Embedding(encoder=mean_encoder(), units=Units(source(), 4))
        finished[index] = make(folder, embedding, index=index, count=parts)

    threads = [threading.Thread(target=part, args=(index,)) for index in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return finished


def test_sixteen_parts_read_local_shards_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_shards(tmp_path, shards=20, size=3, side=200)
    read: Counter[str] = Counter()
    real = tars.open_regular

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            count = super().readinto(buffer)
            read[os.path.basename(str(self.name))] += count
            return count

    def opened(path: Any, mode: str) -> Any:
        real(path, mode).close()
        return io.BufferedReader(Counting(path), 512)

    monkeypatch.setattr(tars, "open_regular", opened)
    finished = share_among(tmp_path / "e", 16, lambda: open_source(data))
    assert Embeddings(tmp_path / "e").rows == 60 and sum(each.made for each in finished) == 20
    assert sum(each.made > 0 for each in finished) > 8
    size = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    assert 0.97 < (sum(read.values()) - 120_000) / size < 1.06  # the first picture twice, and headers: to find damage, to read


def test_sixteen_parts_fetch_remote_shards_once(tmp_path: Path) -> None:
    import functools
    import http.server

    asked: Counter[str] = Counter()

    class Counted(Handler):
        def do_GET(self) -> None:
            asked[self.path] += 1
            super().do_GET()

    write_shards(tmp_path, shards=20, size=3)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Counted, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        data = f"http://127.0.0.1:{server.server_port}/{{0000..0019}}.tar"
        finished = share_among(tmp_path / "e", 16, lambda: open_source(data))
    finally:
        server.shutdown()
        server.server_close()
    assert asked == {f"/{number:04d}.tar": 1 for number in range(20)}
    assert sum(each.made for each in finished) == 20
    rows = Embeddings(tmp_path / "e").read(7).to_pylist()
    assert rows[0]["path"] == data.replace("{0000..0019}", "0007") and rows[0]["member"] == "0021.png"


def test_the_first_image_is_not_read_twice(tmp_path: Path) -> None:
    reads: Counter[str] = Counter()

    class Counted(Pictures):
        def item(self, index: int) -> Item:
            reads[self._keys[index]] += 1
            return super().item(index)

    for n in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{n}.png")
    units = Units(Counted(str(tmp_path)), 2)
    units.first(1)
    assert reads == {"2.png": 1}
    assert [list(units.handles(unit)) for unit in (1, 1, 0)] == [[2], [2], [0, 1]]


def test_units_are_sent_to_processes_after_the_first_image_was_read(tmp_path: Path) -> None:
    for n in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{n}.png")
    units = Units(Pictures(str(tmp_path)), 2)
    units.first(0)
    assert [list(each.handles(0)) for each in (pickle.loads(pickle.dumps(units)), units)] == [[0, 1], [0, 1]]


# data that cannot be used


def test_too_many_bad_samples_end_it_and_complete_files_stay(tmp_path: Path) -> None:
    data = write_shards(tmp_path, broken=9)
    embedding = Embedding(encoder=mean_encoder(max_bad_samples=0.0), units=Units(open_source(data), 9))
    with pytest.raises(CoderError, match=r"1 of \d+ samples skipped.*max_bad_samples"):
        make(tmp_path / "e", embedding)
    kept = sorted(path.name for path in (tmp_path / "e").iterdir() if path.suffix == ".parquet")
    assert kept == ["00000000.parquet", "00000001.parquet"]
    allowed = Embedding(encoder=mean_encoder(), units=Units(open_source(data), 9))
    assert make(tmp_path / "e", allowed).made == 1
    with pytest.raises(CoderError, match="1 of 12 samples skipped"):  # also when others have made the files
        make(tmp_path / "e", embedding)
    with pytest.raises(CoderError, match=r"1 of \d samples skipped"):
        embed_unit(embedding, 2, tmp_path / "one.parquet", Embeddings(tmp_path / "e").header)


def test_a_damaged_shard_is_named_and_the_others_stay(tmp_path: Path) -> None:
    data = write_shards(tmp_path)
    path = tmp_path / "0002.tar"
    path.write_bytes(path.read_bytes()[:3000])
    for workers in (0, 1):
        embedding = Embedding(encoder=mean_encoder(workers=workers), units=Units(open_source(data), 9))
        with pytest.raises(CoderError, match=r"0002.tar' cannot be read"):
            make(tmp_path / "e", embedding)
        assert Embeddings(tmp_path / "e", allow_missing=True).present == [0, 1]
        assert not list((tmp_path / "e").glob(".*.writing")) and not list((tmp_path / "e").glob(".0*"))


def test_data_without_a_usable_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    embedding = Embedding(encoder=mean_encoder(), units=Units(Pictures(str(tmp_path)), 2))
    with pytest.raises(CoderError, match=r"none of the first 1 images can be read; the first: a.png"):
        make(tmp_path.parent / "e", embedding)


def test_an_empty_shard_has_an_empty_file(tmp_path: Path) -> None:
    data = write_shards(tmp_path)
    with tarfile.open(tmp_path / "0001.tar", "w"):
        pass
    finished = make(tmp_path / "e", Embedding(encoder=mean_encoder(workers=1), units=Units(open_source(data), 9)))
    assert finished.images == 8 and [Embeddings(tmp_path / "e").summary(unit).rows for unit in range(3)] == [4, 0, 4]
    assert Embeddings(tmp_path / "e").read(1).num_rows == 0


def test_samples_that_cannot_be_sent_are_an_error_and_no_wait(tmp_path: Path) -> None:
    class Shards:
        name, num_shards, num_images = "theirs", 1, 3

        def read_shard(self, number: int) -> Any:
            yield from (Item(f"{n}", ("x",), lambda: Image.new("RGB", (8, 8))) for n in range(3))

    with pytest.raises(CoderError, match="theirs: its samples cannot be sent to processes: use --workers 0"):
        make(tmp_path / "e", Embedding(encoder=mean_encoder(workers=1), units=Units(Shards(), 9)))
    assert make(tmp_path / "e", Embedding(encoder=mean_encoder(), units=Units(Shards(), 9))).images == 3


def test_a_reader_of_another_package_is_divided_into_blocks(tmp_path: Path) -> None:
    class Theirs:
        name, num_images = "theirs", 7

        def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Any:
            for n in range(7):
                if n // block % world_size == rank:
                    yield n, Item(f"{n}", ("x",), lambda: Image.new("RGB", (8, 8)))

    finished = make(tmp_path / "e", Embedding(encoder=mean_encoder(), units=Units(Theirs(), 3)))
    assert finished.made == 3
    keys = [key for unit in range(3) for key in Embeddings(tmp_path / "e").read(unit)["key"].to_pylist()]
    assert keys == [str(n) for n in range(7)]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (3, "int64", 3), (3.0, "int64", 3), (3.5, "int64", None), ("3.5", "int64", None), (2**63, "int64", None),
        ("x", "int64", None), ([1], "int64", None), ("2.5", "float64", 2.5), (float("nan"), "float64", None),
        (10**400, "float64", None), ("True", "bool", True), (0, "bool", False), ("maybe", "bool", None),
        ({"a": 1}, "string", '{"a": 1}'), ("\udce9", "string", "\\udce9"), (None, "string", None), (7, "string", "7"),
    ],
)  # fmt: skip
def test_values_of_columns(value: Any, kind: str, expected: Any) -> None:
    assert as_type(value, kind) == expected


def test_a_job_embeds_units_in_any_order(model: str, tmp_path: Path) -> None:
    data = write_shards(tmp_path)
    job = EmbedJob(model=model, data=data, output=str(tmp_path / "e"), options={"workers": 0})
    assert job.start() == 3
    done = [job(unit) for unit in (2, 0, 1, 2)]
    assert [each["unit"] for each in done] == [2, 0, 1, 2] and done[0] == done[3] and done[1]["rows"] == 4
    made = content(tmp_path / "e")
    whole = EmbedJob(model=model, data=data, output=str(tmp_path / "f"), options={"workers": 0})
    assert whole.run(shown=False).made == 3 and content(tmp_path / "f") == made
    with pytest.raises(CoderError, match="begun with other options"):
        EmbedJob(model=model, data=data, output=str(tmp_path / "e"), what="images", options={"workers": 0}).start()


def test_two_attempts_at_a_unit_wait_for_each_other(model: str, tmp_path: Path) -> None:
    job = EmbedJob(model=model, data=write_shards(tmp_path), output=str(tmp_path / "e"), options={"workers": 0})
    job.start()
    first = claims.lock_file(tmp_path / "e" / ".00000001.lock")
    assert first is not None
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(job, 1)
        with pytest.raises(TimeoutError):
            second.result(0.5)
        assert not (tmp_path / "e" / "00000001.parquet").exists()
        os.close(first)
        assert second.result()["unit"] == 1
    assert not (tmp_path / "e" / ".00000001.lock").exists()


def test_an_error_of_the_data_is_not_one_of_the_folder(tmp_path: Path) -> None:
    def unreachable() -> Any:
        raise OSError("the server does not answer")

    with pytest.raises(OSError, match="^the server does not answer$"):
        open_folder(tmp_path / "e", {}, unreachable)
    (tmp_path / "file").write_text("")
    with pytest.raises(CoderError, match="file/e cannot be written: .*Not a directory"):
        open_folder(tmp_path / "file" / "e", {}, unreachable)


def test_a_model_without_weights_is_warned_of(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, weights = write_shards(tmp_path), {"pretrained": f"{model}/open_clip_model.safetensors"}
    for name, options, warnings in ((None, {}, 1), (None, weights, 0), (model, {}, 0)):
        caplog.clear()
        named = {} if name else {"model": "coder-tiny"}
        EmbedJob(model=name, data=data, output=str(tmp_path / "e"), options={"workers": 0, **named, **options}).plan()
        assert [each.getMessage() for each in caplog.records] == [
            "coder-tiny has random weights, so its vectors mean nothing: name trained ones with --pretrained"
        ] * warnings


def test_ranks_of_a_launcher_join_no_group(model: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Nobody else is there: a process that waited for its group would hang."""
    data = write_shards(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = ["embed", model, "--data", data, "--output", str(tmp_path / "e"), "--workers", "0"]
    assert main(command) == 0 and not torch.distributed.is_initialized()
    assert "3 files, 12 images" in capsys.readouterr().out


def test_the_share_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_of(None, None) == (0, 1) and share_of(2, 4) == (2, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert share_of(None, None) == (1, 8) and share_of(2, 4) == (17, 32)


def test_progress_counts_the_files_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shards the number of images is estimated from the first one."""
    header = begin(tmp_path, Embedding(encoder=mean_encoder(), units=Units(ItemSource([ITEM] * 8), 2)), model=MODEL, plan={})
    write_unit(tmp_path / header.file(3), header, 3, [])
    progress = embed._Progress(tmp_path, header, 8, shown=False)
    assert (progress.bar.done, progress.bar.total) == (2, 8)  # a file of four
    progress.advance(1)
    assert progress.bar.done == 3
    unknown = embed._Progress(tmp_path, header, None, shown=False)
    unknown.advance(10)
    assert (unknown.bar.done, unknown.bar.total) == (10, None)
    write_unit(tmp_path / header.file(0), header, 0, [])
    unknown.finish(UnitSummary(0, 9, 0, [("picture", "x")], None, ""))
    assert (unknown.bar.total, unknown.bar.begun) == (40, 10)
    unknown.advance(4)
    assert unknown.bar.done == 24  # two of four files, and four images


def test_a_stream_of_a_data_set_by_its_shards(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    for shard in range(2):
        texts = [f"{shard} {n}" for n in range(3)]
        rows = {"image": [{"bytes": file.getvalue(), "path": None}] * 3, "text": texts, "year": [1, 2, 3]}
        kinds = {"image": datasets.Image(), "text": datasets.Value("string"), "year": datasets.Value("int32")}
        features = datasets.Features(kinds)
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{shard}.parquet")
    folders = []
    for kind in ("hf-streaming", "hf"):
        source = open_source(str(tmp_path / "*.parquet"), kind, metadata=["year"])
        folders.append(tmp_path / kind)
        make(folders[-1], Embedding(encoder=mean_encoder(workers=1), units=Units(source, 3)), columns={"year": "int64"})
    for name in ("captions", "image_vector", "year"):
        streamed, whole = ([Embeddings(folder).read(unit, [name]).to_pydict() for unit in range(2)] for folder in folders)
        assert streamed == whole
    assert streamed == [{"year": [1, 2, 3]}] * 2
    with pytest.raises(CoderError, match=r"no column 'month' \(--columns\); its columns are: 'image', 'text', 'year'"):
        open_source(str(tmp_path / "*.parquet"), "hf", metadata=["month"])


def test_fields_of_other_readers(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    entry = {"filename": "a.png", "split": "val", "sentences": [{"raw": "a dog"}], "source": "web"}
    (tmp_path / "dataset_x.json").write_text(json.dumps({"images": [entry]}))
    (tmp_path / "00000").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "00000" / "0.jpg")
    (tmp_path / "00000" / "0.txt").write_text("a dog")
    (tmp_path / "00000" / "0.json").write_text(json.dumps({"source": "web", "status": "success"}))
    for source, path in (
        (open_source(str(tmp_path / "dataset_x.json"), split="val", metadata=["source", "absent"]), "a.png"),
        (open_source(str(tmp_path), "img2dataset", metadata=["source", "absent"]), "00000/0.jpg"),
    ):
        [(_, item)] = source.items()
        assert item.metadata == {"source": "web", "absent": None} and item.path == str(tmp_path / path)
        assert item.path == os.path.abspath(item.path) and hash(item) is not None
    coco = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"id": 2, "image_id": 1, "caption": "a dog"}]}
    (tmp_path / "captions_x.json").write_text(json.dumps(coco))
    [(_, item)] = open_source(str(tmp_path / "captions_x.json")).items()
    assert item.path == str(tmp_path / "a.png")
