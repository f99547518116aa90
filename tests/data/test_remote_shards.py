"""Shards that are not on this machine: the samples of local ones, and every failure is an error that names the shard."""

from __future__ import annotations

import functools
import http.server
import io
import json
import os
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from PIL import Image

from coder_plugin.cli import main
from coder_plugin.data import open_source
from coder_plugin.data.bad_samples import BadSamples
from coder_plugin.data.loader import TrainLoader, evaluation_batches
from coder_plugin.data.streams import STRIDE
from coder_plugin.errors import CoderError


def png(number: int, side: int = 4) -> bytes:
    picture = io.BytesIO()
    Image.new("RGB", (side, side), (number, 0, 0)).save(picture, "PNG")
    return picture.getvalue()


def write_shards(folder: Path, shards: int = 2, size: int = 6, side: int = 4) -> None:
    for shard in range(shards):
        with tarfile.open(folder / f"s{shard}.tar", "w") as tar:
            for n in range(shard * size, (shard + 1) * size):
                for ending, content in (("png", png(n, side)), ("txt", f"caption {n}".encode())):
                    info = tarfile.TarInfo(f"{n:03d}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    (folder / "sizes.json").write_text(json.dumps({f"s{shard}.tar": size for shard in range(shards)}))


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; of ``cut.tar`` fewer bytes than announced; ``endless`` has no end, and ``stalled`` none that comes."""

    def do_GET(self) -> None:
        if self.path.endswith(("/endless", "/stalled")):
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 16) if self.path.endswith("/endless") else b"")
                    time.sleep(0.01)
            return None
        if self.path.endswith("/refused.tar"):
            return self.send_error(403)
        if not self.path.endswith("/cut.tar"):
            return super().do_GET()
        content = Path(self.directory, "s0.tar").read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path)
    return tmp_path


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def samples(spec: str) -> list[tuple[str, tuple[str, ...], Any]]:
    """In order, without their positions, which count the images only where all shards are local."""
    pairs = list(open_source(spec).items())
    assert [n for n, _ in pairs] == sorted({n for n, _ in pairs})
    return [(item.key, item.captions, item.load().getpixel((0, 0))) for _, item in pairs]


def fault(spec: str) -> str:
    with pytest.raises(CoderError) as caught:
        list(open_source(spec).items())
    assert "\n" not in str(caught.value)
    return str(caught.value)


# the samples


def test_http(folder, url):
    expected = samples(str(folder / "s{0..1}.tar"))
    assert samples(f"{url}/s{{0..1}}.tar") == expected and len(expected) == 12
    assert samples(f"{url}/s0.tar::{folder}/s1.tar") == expected
    assert open_source(f"{url}/s{{0..1}}.tar").samples("draw") == 12  # of sizes.json beside them
    assert open_source(f"{url}/s0.tar::{folder}/s1.tar").samples("draw") == 12


def test_file_systems_of_fsspec(folder):
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe(f"/set/{path.name}", path.read_bytes())
    assert samples("memory://set/s{0..1}.tar") == samples(str(folder / "s{0..1}.tar"))
    assert open_source("memory://set/s{0..1}.tar").samples("draw") == 12
    memory.pipe("/set/sizes.json", b'{"s0.tar": 6}')
    with pytest.raises(CoderError, match="give --train-num-samples, or a sizes.json beside the shards"):
        open_source("memory://set/s{0..1}.tar").samples("draw")


def test_a_bucket_by_its_library(folder, monkeypatch):
    opened = []

    class Bucket:
        def open(self, path: str, mode: str) -> Any:
            opened.append(path)
            return open(folder / os.path.basename(path), mode)

    monkeypatch.setattr(fsspec, "filesystem", {"s3": Bucket()}.__getitem__)
    assert len(samples("s3://bucket/s{0..1}.tar")) == 12 and opened == ["s3://bucket/s0.tar", "s3://bucket/s1.tar"]


def test_the_hub(folder, monkeypatch):
    class Hub:
        def open(self, path: str, mode: str) -> Any:
            assert path.startswith("hf://datasets/owner/name@main/data/")
            return open(folder / os.path.basename(path), mode)

    monkeypatch.setattr(fsspec, "filesystem", {"hf": Hub()}.__getitem__)
    assert samples("hf://datasets/owner/name@main/data/s{0..1}.tar") == samples(str(folder / "s{0..1}.tar"))


def loader(spec: str, **options: Any) -> TrainLoader:
    source: Any = open_source(spec)
    source.buffer = 4
    given: dict[str, Any] = {"batch_size": 2, **options}
    return TrainLoader(
        source,
        transform=lambda picture: torch.tensor(picture.getpixel((0, 0))),
        tokenizer=lambda texts: torch.tensor([[int(text.split()[1])] for text in texts]),
        **given,
    )


@pytest.mark.parametrize(("workers", "batch_size"), [(0, 4), (2, 2)])
def test_a_stream_gives_every_sample_once_and_resumes(folder, url, workers, batch_size):
    """Also where a worker's samples do not fill a batch."""
    spec, options = f"{url}/s{{0..1}}.tar", {"workers": workers, "batch_size": batch_size}
    whole, batches, positions = loader(spec, **options), [], []
    for batch in whole.epoch(0):
        batches.append(batch["text"].tolist())
        positions.append(json.loads(json.dumps(whole.position())))
    seen = [n for batch in batches for (n,) in batch]
    assert len(seen) == len(set(seen)) == 12 and seen != sorted(seen)
    for used, position in [*enumerate(positions, 1)][:: 1 + workers]:
        assert [batch["text"].tolist() for batch in loader(spec, **options).epoch(0, position)] == batches[used:]
    found = evaluation_batches(
        open_source(spec), batch_size=4, transform=lambda _: torch.zeros(1), bad=BadSamples(spec), workers=workers
    )
    indices = sorted(n for batch in found for n in batch["index"].tolist())
    assert indices == [shard * STRIDE + n for shard in range(2) for n in range(6)]


@pytest.mark.parametrize("then, now", [({}, {"world_size": 2}), ({"workers": 2}, {"workers": 3})])
def test_a_stream_goes_on_with_the_next_epoch_on_other_ranks_or_workers(folder, then, now, caplog):
    spec = "::".join(f"pipe:cat {folder}/s{n}.tar" for n in range(2))
    begun = loader(spec, num_samples=12, **then)
    next(begun.epoch(3))
    other = loader(spec, num_samples=12, **now)
    assert list(other.epoch(3, [begun.position()])) == []
    assert caplog.text.count("goes on with epoch 5") == 1
    at = other.position()
    assert at["batches"] >= at["of"]  # to the trainer the epoch is over
    assert len(list(other.epoch(4))) == other.steps_per_epoch


def test_training_from_the_command_line(folder, url, capsys):
    write_shards(folder, size=8, side=32)
    flags = ["--model", "coder-tiny", "--loss", "clip", "--epochs", "1", "--batch-size", "4", "--workers", "1"]
    assert main(["train", "--train-data", f"{url}/s{{0..1}}.tar", *flags, "--logs", str(folder / "logs"), "--no-report"]) == 0
    (log,) = (folder / "logs").glob("*/metrics.jsonl")
    assert log.read_text() and "1 epoch of 4 steps" in capsys.readouterr().out


# failures


def test_a_shard_that_is_absent_or_ends_early_is_an_error(folder, url):
    assert fault(f"{url}/absent.tar") == f"shard '{url}/absent.tar' cannot be read: HTTP Error 404: File not found"
    assert "cut.tar' cannot be read: " in fault(f"{url}/cut.tar")
    whole = (folder / "s0.tar").read_bytes()
    with tarfile.open(folder / "s0.tar") as tar:
        last = tar.getmembers()[-2].offset
    (folder / "short.tar").write_bytes(whole[:last])  # between two samples: each that is there is whole
    for location in (f"{url}/short.tar", f"pipe:cat {folder}/short.tar"):
        assert "truncated or damaged at byte" in fault(location)


def test_what_keeps_a_server_from_giving_a_shard_is_said(url):
    assert fault(f"{url}/refused.tar").endswith("cannot be read: HTTP Error 403: Forbidden")
    with socket.socket() as unused:  # bound, but nobody listens
        unused.bind(("127.0.0.1", 0))
        assert "Connection refused" in fault(f"http://127.0.0.1:{unused.getsockname()[1]}/a.tar")
    assert "cannot be read" in fault("http://no-such-host.invalid/a.tar")


def test_a_command_that_fails_is_an_error_also_after_its_output(folder):
    assert "status 3" in fault(f"pipe:cat {folder}/s0.tar; exit 3")
    assert "status 4" in fault("pipe:exit 4")
    assert "status 1" in fault(f"pipe:cat {folder}/absent.tar 2>/dev/null")


def test_what_is_missing_is_said_before_anything_is_read():
    for location, words in (
        ("s3://bucket/{0..3}.tar", ["s3fs", "pipe:COMMAND s3://bucket/3.tar"]),
        ("nowhere://0.tar", ["nowhere", "pipe:COMMAND nowhere://0.tar"]),
        ("https://example.org/*.tar", ["braces"]),
    ):
        with pytest.raises(CoderError) as caught:
            open_source(location)
        assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), str(caught.value)
