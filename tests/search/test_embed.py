"""Embedding into Parquet files: what is in them, stops, tasks, and how often the data are read."""

from __future__ import annotations

import functools
import http.server
import io
import os
import pickle
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from coder_plugin.cli import main
from coder_plugin.data import open_source
from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.item import Item, bad_item
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.regions.join import RegionSource
from coder_plugin.data.source import ItemSource
from coder_plugin.data.streams import Stream
from coder_plugin.data.units import Slices
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.open import open_pretrained
from coder_plugin.search import embed as embedding
from coder_plugin.search.embed import EmbedJob, as_type, embedded
from coder_plugin.search.parquet import read_npy
from tests import region_model
from tests.search.made import write_model, write_pictures
from tests.training import region_data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model") / "export", "dcl"))


def write_shards(folder: Path, *, shards: int = 3, size: int = 4, broken: int = -1) -> str:
    """Shards of pictures of noise with captions and json."""
    rng = np.random.default_rng(0)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as tar:
            for n in range(shard * size, (shard + 1) * size):
                file = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(file, "PNG")
                fields = f'{{"n": {n}, "source": "{("book", "web")[n % 2]}", "ratio": {n / 2}}}'
                picture = b"broken" if n == broken else file.getvalue()
                for name, data in (("png", picture), ("txt", f"caption {n}".encode()), ("json", fields.encode())):
                    member = tarfile.TarInfo(f"{n:04d}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return str(folder / f"{{0000..{shards - 1:04d}}}.tar")


def job_of(model: str, data: str, output: Path, **options: Any) -> EmbedJob:
    reading = {"workers": 0, "batch_size": 3, **options.pop("options", {})}
    return EmbedJob(model=model, data=data, output=str(output), options=reading, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_files_hold_what_the_encoder_gives(model: str, tmp_path: Path) -> None:
    """One file for each shard, with places and fields; a caption's vector is in its image's row."""
    data = write_shards(tmp_path)
    columns = {"n": "int64", "source": "string", "ratio": "float64"}
    finished = job_of(model, data, tmp_path / "e", columns=columns).run(shown=False)
    assert finished[:5] == (3, 3, 3, 12, 12)
    table = embedded(tmp_path / "e")
    encoded = open_pretrained(model).encoder(workers=0)(open_source(data))
    kept = torch.from_numpy(np.concatenate([*table.vector_batches("images")]))
    torch.testing.assert_close(kept, encoded.images, atol=1e-6, rtol=0)
    texts = torch.from_numpy(np.concatenate([*table.vector_batches("captions")]))
    torch.testing.assert_close(texts, encoded.texts, atol=1e-6, rtol=0)
    file = pq.read_table(tmp_path / "e" / "00000001.parquet").to_pylist()
    assert [row["captions"] for row in file] == [[f"caption {n}"] for n in range(4, 8)]
    assert file[1]["path"] == str(tmp_path / "0001.tar") and file[1]["member"] == "0005.png"
    assert [(row["n"], row["source"], row["ratio"]) for row in file[:2]] == [(4, "book", 2.0), (5, "web", 2.5)]
    assert file[0]["thumbnail"][:3] == b"\xff\xd8\xff"
    assert table.headers[0]["model"]["fingerprint"] == open_pretrained(model).fingerprint()


def test_regions_with_tokens(tmp_path: Path) -> None:
    data = region_data.write_precomp(tmp_path)
    export_model(region_model.make("dcl + ascl(similarity=fusion)", seed=3), tmp_path / "export")
    job = job_of(str(tmp_path / "export"), data, tmp_path / "e", split="dev", tokens=None, rows_per_file=10)
    assert job.run(shown=False).files == 3
    encoded = open_pretrained(tmp_path / "export").encoder(workers=0, batch_size=3)(open_source(data, split="dev"))
    table = embedded(tmp_path / "e")
    cells = [read_npy(each) for _, batch in table.batches(["image_tokens_tokens"]) for each in batch.column(0).to_pylist()]
    for cell, tokens in zip(cells, encoded.items.images["tokens"], strict=True):
        np.testing.assert_allclose(cell, tokens[: len(cell)].numpy(), atol=2e-3)
    os.utime(Path(data) / "dev_ims.npy", ns=(1, 1))
    embedding._opened.cache_clear()  # as another process
    with pytest.raises(CoderError, match="the files of regions have changed"):
        job.run(shown=False)
    rows = [row for _, batch in table.batches(["text_tokens_tokens"]) for row in batch.column(0).to_pylist()]
    texts = [read_npy(each) for row in rows for each in row]
    assert len(texts) == len(encoded.captions) and texts[0].dtype == np.float16


def test_bad_samples_are_left_out_and_listed(model: str, tmp_path: Path) -> None:
    data = write_shards(tmp_path, broken=5)
    finished = job_of(model, data, tmp_path / "e").run(shown=False)
    assert finished.bad == Counter({"picture": 1}) and finished.images == 11
    assert embedded(tmp_path / "e").headers[1]["bad"] == [["picture", embedded(tmp_path / "e").headers[1]["bad"][0][1]]]
    again = job_of(model, data, tmp_path / "e").run(shown=False)
    assert (again.made, again.bad) == (0, finished.bad)
    with pytest.raises(CoderError, match="samples skipped .picture 1., more than max_bad_samples=0 of them"):
        job_of(model, data, tmp_path / "strict", options={"max_bad_samples": 0}).run(shown=False)


def test_a_stop_and_a_torn_file_change_nothing(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_shards(tmp_path)
    job_of(model, data, tmp_path / "whole").run(shown=False)
    job, written = job_of(model, data, tmp_path / "e"), []
    real = embedding.write_file

    def stopping(path: Path, *args: Any) -> Any:
        written.append(path)
        if len(written) == 2:
            raise KeyboardInterrupt
        return real(path, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(embedding, "write_file", stopping)
        job.run(shown=False)
    assert [path.name for path in (tmp_path / "e").iterdir()] == ["00000000.parquet"]
    with pytest.raises(CoderError, match="is not finished: 2 of 3 files are missing"):
        embedded(tmp_path / "e")
    assert job.run(shown=False).made == 2
    assert content(tmp_path / "e") == content(tmp_path / "whole")
    torn = tmp_path / "e" / "00000001.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(CoderError, match="00000001.parquet is damaged"):
        embedded(tmp_path / "e")
    assert job.run(shown=False).made == 1
    assert content(tmp_path / "e") == content(tmp_path / "whole")


def test_tasks_and_calls_in_any_order_make_the_same_files(model: str, tmp_path: Path) -> None:
    """Each task its stripe; a pickled job, called with a unit's number; two decoding processes."""
    data = write_shards(tmp_path)
    job_of(model, data, tmp_path / "whole").run(shown=False)
    parts = job_of(model, data, tmp_path / "parts")
    assert [parts.run(index=index, count=2, shown=False)[:3] for index in (1, 0)] == [(3, 1, 1), (3, 3, 2)]
    called = pickle.loads(pickle.dumps(job_of(model, data, tmp_path / "called")))
    assert [called(unit)["rows"] for unit in (2, 0, 1, 0)] == [4] * 4
    processes = job_of(model, data, tmp_path / "processes", options={"workers": 2})
    processes.run(shown=False)
    whole = content(tmp_path / "whole")
    assert content(tmp_path / "parts") == content(tmp_path / "called") == content(tmp_path / "processes") == whole


def test_parts_fetch_remote_shards_once(model: str, tmp_path: Path) -> None:
    """Five tasks, each its stripe of seven shards; what is complete is not fetched again."""
    asked: Counter[str] = Counter()

    class Counted(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] += 1
            super().do_GET()

        def log_message(self, *_: Any) -> None: ...

    write_shards(tmp_path, shards=7, size=2)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Counted, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        job = job_of(model, f"http://127.0.0.1:{server.server_port}/{{0000..0006}}.tar", tmp_path / "e")
        made = [job.run(index=index, count=5, shown=False).made for index in range(5)]
        assert job.run(shown=False).made == 0
    finally:
        server.shutdown()
        server.server_close()
    assert made == [2, 2, 1, 1, 1]
    assert {name: count for name, count in asked.items() if name.endswith(".tar")} == {f"/{n:04d}.tar": 1 for n in range(7)}
    rows = pq.read_table(tmp_path / "e" / "00000003.parquet").to_pylist()
    assert rows[0]["path"] == f"http://127.0.0.1:{server.server_port}/0003.tar" and rows[0]["member"] == "0006.png"


def test_other_options_and_other_files_are_refused(model: str, tmp_path: Path) -> None:
    data = write_shards(tmp_path)
    job = job_of(model, data, tmp_path / "e")
    job.run(shown=False)
    before = content(tmp_path / "e")
    for other, text in (
        (replace(job, what="images"), "what was both, is images"),
        (replace(job, thumbnails=5), "thumbnails was 128, is 5"),
        (replace(job, model=str(write_model(tmp_path / "other", "dcl", seed=9))), "another model"),
    ):
        with pytest.raises(CoderError, match=f"was begun with other options .*{text}"):
            other.run(shown=False)
    assert content(tmp_path / "e") == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    with pytest.raises(CoderError, match=r"notes holds other files \(a.txt\): choose another folder"):
        replace(job, output=str(tmp_path / "notes")).run(shown=False)
    with pytest.raises(CoderError, match="is damaged|holds no embeddings"):
        embedded(tmp_path / "notes")


def test_data_that_cannot_be_embedded(model: str, tmp_path: Path) -> None:
    data = region_data.write_precomp(tmp_path)
    with pytest.raises(CoderError, match="the data are regions; they need an open_clip --model|the data are regions"):
        job_of(model, data, tmp_path / "e", split="dev").run(shown=False)
    write_shards(tmp_path, shards=1, size=1, broken=0)
    with pytest.raises(CoderError, match="no image could be used: 1 of 1 samples skipped"):
        job_of(model, str(tmp_path / "0000.tar"), tmp_path / "none", options={"max_bad_samples": 0.999}).run(shown=False)
    with pytest.raises(CoderError, match="has no head that re-ranks: add --reranker maxsim"):
        job_of(model, data, tmp_path / "t", tokens=True).run(shown=False)
    with pytest.raises(CoderError, match="column 'key': the file has a column of that name already"):
        job_of(model, data, tmp_path / "c", columns={"key": "string"}).run(shown=False)


def test_blocks_of_slices_and_of_shards() -> None:
    """In the order that is asked for; items of a stream that no process can be sent."""

    class Reader(Stream):
        name, num_shards = "other", 2

        def read_shard(self, number: int) -> Iterator[Item]:
            return (Item(f"{number}/{n}", ("a",), lambda: Image.new("RGB", (4, 4))) for n in range(2))

    def keys(source: Any, units: list[int], workers: int = 0) -> list[list[str]]:
        decoded = Slices(source, 3).blocks(units, lambda picture: torch.zeros(1), 2, workers=workers)
        return [[item.key for item in block.items] for block in decoded]

    pictures = ItemSource([Item(str(n), ("a",), partial(_picture, 0)) for n in range(7)])
    assert len(Slices(pictures, 3)) == 3 and keys(pictures, [2, 1], 1) == [[], ["6"], [], ["3", "4"], ["5"]]
    assert keys(Reader(), [1, 0]) == [[], ["1/0", "1/1"], [], ["0/0", "0/1"]]
    faulty = ItemSource([bad_item("x", BadSample("caption", "none")), Item("y", ("a",), partial(_picture, 3))])
    (_, block) = Slices(faulty, 3).blocks([0], None, 2, workers=0)  # captions alone: the broken picture does not matter
    assert [item.key for item in block.items] == ["y"] and block.bad == [("caption", "x", "none")] and block.image is None
    with pytest.raises(CoderError, match="other: its samples cannot be sent to processes: use --workers 0"):
        keys(Reader(), [0], 1)
    with pytest.raises(CoderError, match="--rows-per-file must be at least 1"):
        Slices(Reader(), 0)


def test_thumbnails_of_regions_are_of_their_pictures() -> None:
    """Of the same key; of a source that is read by position, and of one in shards. None where the picture is broken."""
    pictures = ItemSource([Item(f"{n}", ("a",), partial(_picture, n)) for n in range(4)])
    regions = {item.key: _regions() for _, item in pictures.items()}
    slices = Slices(RegionSource(pictures, regions), 2, pictures=pictures)
    decoded = slices.blocks([1, 0], lambda regions: torch.zeros(1), 3, workers=0, thumbnails=8)
    blocks = [block for block in decoded if block.items]
    thumbnails = [file for block in blocks for file in block.thumbnails]
    assert [item.key for block in blocks for item in block.items] == ["2", "3", "0", "1"] and thumbnails[1] == b""
    reds = [Image.open(io.BytesIO(file)).getpixel((4, 4))[0] for file in thumbnails if file]
    assert reds == pytest.approx([40, 0, 20], abs=3)
    others = ItemSource([Item(f"{n}", ("a",), partial(_picture, n)) for n in (1, 0)])
    slices = Slices(RegionSource(pictures, regions), 4, pictures=others)
    (_, block) = slices.blocks([0], lambda regions: torch.zeros(1), 4, workers=0, thumbnails=8)
    assert not any(block.thumbnails)  # pictures of other keys in these places, and fewer of them


def _picture(number: int) -> Image.Image:
    if number == 3:
        raise OSError("broken")
    return Image.new("RGB", (8, 8), (20 * number, 0, 0))


def _regions() -> Regions:
    return Regions(np.ones((2, 3), np.float32))


@pytest.mark.parametrize(
    "value, kind, expected",
    [("7", "int64", 7), (7.5, "int64", None), (2**70, "int64", None), ("x", "float64", None), ("nan", "float64", None),
     ("True", "bool", True), (0, "bool", False), ({"a": 1}, "string", '{"a": 1}'), (None, "string", None)],
)  # fmt: skip
def test_values_of_columns(value: Any, kind: str, expected: Any) -> None:
    assert as_type(value, kind) == expected


def test_the_command(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_pictures(tmp_path, 10)
    command = ["embed", model, "--data", str(data), "--output", str(tmp_path / "e"), "--workers", "0", "--rows-per-file", "4"]
    flags = ["--columns", "source", "width:int64"]
    assert main([*command, *flags, "--task-index", "1", "--task-count", "2"]) == 0
    printed = capsys.readouterr().out
    assert "1 file, 4 images, 8 captions; 1 file made here" in printed and "2 files of other tasks are missing" in printed
    assert main([*command, *flags]) == 0
    assert "3 files, 10 images, 20 captions; 2 files made here, vectors of 128 dimensions, float32" in capsys.readouterr().out
    assert main([*command, *flags]) == 0
    assert "is already finished: 3 files, 10 images, 20 captions; nothing to do" in capsys.readouterr().out
    table = pq.read_table(tmp_path / "e")
    assert table.column("width").to_pylist() == [10 * n for n in range(10)]
    assert table.column("source").to_pylist()[:3] == ["coco", "it's", None]
