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
from PIL import Image

from coder_plugin.cli import main
from coder_plugin.data import open_source, remote
from coder_plugin.data.loader import TrainLoader, evaluation_batches
from coder_plugin.data.shard_lists import recorded_size
from coder_plugin.data.source import SHARD
from coder_plugin.errors import CoderError


def write_shards(folder: Path, shards: int = 2, size: int = 6, side: int = 4) -> None:
    for shard in range(shards):
        with tarfile.open(folder / f"s{shard}.tar", "w") as tar:
            for n in range(shard * size, (shard + 1) * size):
                picture = io.BytesIO()
                Image.new("RGB", (side, side), (n, 0, 0)).save(picture, "PNG")
                for ending, content in (("png", picture.getvalue()), ("txt", f"caption {n}".encode())):
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


def test_a_small_file_that_is_large_or_late_is_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote.read_small(f"{url}/sizes.json", 1000) == b'{"s0.tar": 6, "s1.tar": 6}'
    assert remote.read_small(f"{url}/sizes.json", 10) is None
    assert remote.read_small(f"{url}/absent.json", 1000) is None
    monkeypatch.setattr(remote, "_PATIENCE", 1)
    begun = time.monotonic()
    assert remote.read_small(f"{url}/endless", 1000) is None
    assert remote.read_small(f"{url}/stalled", 1000) is None
    assert time.monotonic() - begun < 20


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


@pytest.fixture
def programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``aws`` and ``gsutil`` that give the files of the folder in place of those in a bucket, and note their arguments."""
    programs = folder / "programs"
    programs.mkdir()
    for name, place in (("aws", '"$4"'), ("gsutil", '"$2"')):
        script = programs / name
        script.write_text(f'#!/bin/sh\necho "$@" >> {programs}/calls\nexec cat {folder}/$(basename {place})\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)  # s3fs and gcsfs are not installed
    return programs


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


def test_a_bucket_by_its_program(folder, programs):
    expected = samples(str(folder / "s{0..1}.tar"))
    assert samples("s3://bucket/set/s{0..1}.tar") == expected == samples("gs://bucket/set/s{0..1}.tar")
    assert (programs / "calls").read_text().splitlines() == [
        "s3 cp --only-show-errors s3://bucket/set/s0.tar -",
        "s3 cp --only-show-errors s3://bucket/set/s1.tar -",
        "cat gs://bucket/set/s0.tar",
        "cat gs://bucket/set/s1.tar",
    ]
    assert open_source("s3://bucket/set/s{0..1}.tar").samples("draw") == 12


def test_file_systems_of_fsspec(folder):
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe(f"/set/{path.name}", path.read_bytes())
    assert samples("memory://set/s{0..1}.tar") == samples(str(folder / "s{0..1}.tar"))
    assert open_source("memory://set/s{0..1}.tar").samples("draw") == 12
    memory.pipe("/set/sizes.json", b'{"s0.tar": 6}')
    with pytest.raises(CoderError, match="give --train-num-samples, or a sizes.json beside the shards"):
        open_source("memory://set/s{0..1}.tar").samples("draw")


def test_a_bucket_by_its_library_if_it_is_installed(folder, monkeypatch):
    opened = []

    class Bucket:
        def open(self, path: str, mode: str) -> Any:
            opened.append(path)
            return open(folder / os.path.basename(path), mode)

    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: object() if name == "s3fs" else None)
    monkeypatch.setattr(fsspec, "filesystem", {"s3": Bucket()}.__getitem__)
    assert len(samples("s3://bucket/s{0..1}.tar")) == 12 and opened == ["s3://bucket/s0.tar", "s3://bucket/s1.tar"]


def test_the_hub(folder, monkeypatch):
    class Hub:
        def open(self, path: str, mode: str) -> Any:
            assert path.startswith("hf://datasets/owner/name@main/data/")
            return open(folder / os.path.basename(path), mode)

    monkeypatch.setattr("huggingface_hub.HfFileSystem", Hub)
    assert samples("hf://datasets/owner/name@main/data/s{0..1}.tar") == samples(str(folder / "s{0..1}.tar"))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_local_shards_and_resume(folder, url, workers):
    import torch

    def loader(spec: str) -> TrainLoader:
        return TrainLoader(
            open_source(spec),
            batch_size=2,
            transform=lambda picture: torch.tensor(picture.getpixel((0, 0))),
            tokenizer=lambda texts: torch.tensor([[int(text.split()[1])] for text in texts]),
            workers=workers,
            shuffle_buffer=4,
        )

    local, ours = loader(str(folder / "s{0..1}.tar")), loader(f"{url}/s{{0..1}}.tar")
    expected = [batch["text"].tolist() for batch in local.epoch(0)]
    stream = ours.epoch(0)
    begun = [next(stream)["text"].tolist() for _ in range(2)]
    position = ours.position()
    stream.close()
    assert begun + [batch["text"].tolist() for batch in loader(f"{url}/s{{0..1}}.tar").epoch(0, position)] == expected
    parts = evaluation_batches(
        open_source(f"{url}/s{{0..1}}.tar"), batch_size=4, transform=lambda _: torch.zeros(1), workers=workers
    )
    positions = sorted(n for batch in parts for n in batch["index"].tolist())
    assert positions == [shard * SHARD + n for shard in range(2) for n in range(6)]


def test_training_from_the_command_line(folder, url, capsys):
    write_shards(folder, size=8, side=32)
    flags = ["--model", "coder-tiny", "--loss", "clip", "--epochs", "1", "--batch-size", "4", "--workers", "1"]
    assert main(["train", "--train-data", f"{url}/s{{0..1}}.tar", *flags, "--logs", str(folder / "logs"), "--no-report"]) == 0
    (log,) = (folder / "logs").glob("*/metrics.jsonl")
    assert log.read_text() and "1 epoch of 4 steps" in capsys.readouterr().out


# failures


def test_a_shard_that_is_absent_or_ends_early_is_an_error(folder, url):
    absent = f"shard '{url}/absent.tar' cannot be read: the server has no such file (404 Not Found): check the address"
    assert fault(f"{url}/absent.tar") == absent
    assert "cut.tar' cannot be read: the transfer ended before the file did (curl's status 18)" in fault(f"{url}/cut.tar")
    whole = (folder / "s0.tar").read_bytes()
    with tarfile.open(folder / "s0.tar") as tar:
        last = tar.getmembers()[-2].offset
    (folder / "short.tar").write_bytes(whole[:last])  # between two samples: each that is there is whole
    for location in (f"{url}/short.tar", f"pipe:cat {folder}/short.tar"):
        assert "without a tar file's end" in fault(location)


def test_what_keeps_a_server_from_giving_a_shard_is_said_in_words(url, monkeypatch):
    monkeypatch.setattr(remote, "_CURL", [*remote._CURL, "--retry", "1", "--retry-delay", "1"])  # 30 tries take a minute
    assert fault(f"{url}/refused.tar").endswith("the server refuses access (403 Forbidden): check the address and your rights")
    with socket.socket() as unused:  # bound, but nobody listens
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}/a.tar"
        assert "the server does not accept the connection: check the address and the network" in fault(closed)
    assert "the server's name is not known: check the address and the network" in fault("http://no-such-host.invalid/a.tar")
    assert "the server has no such file, or refuses it (curl's status 22)" in fault(f"pipe:curl -sf {url}/absent.tar")


def test_a_program_says_why_it_failed(programs):
    said = "fatal error: Unable to locate credentials"
    (programs / "aws").write_text(f"#!/bin/sh\necho progress >&2\necho '{said}' >&2\nexit 1\n")
    assert fault("s3://bucket/a.tar").endswith(f"ended with status 1: {said}")


def test_a_command_that_fails_is_an_error_also_after_its_output(folder):
    assert "status 3" in fault(f"pipe:cat {folder}/s0.tar; exit 3")
    assert "status 4" in fault("pipe:exit 4")
    assert "status 1" in fault(f"pipe:cat {folder}/absent.tar 2>/dev/null")


def test_what_follows_a_tar_files_end_is_read_too(folder, programs):
    """A program whose output nobody reads is ended by a signal, as if it had failed."""
    with open(folder / "s0.tar", "ab") as file:
        file.write(bytes(1 << 20))
    assert len(samples("s3://bucket/s0.tar")) == 6


def test_a_bucket_whose_program_fails(programs):
    assert "status 1" in fault("s3://bucket/set/absent.tar 2>/dev/null")
    assert recorded_size(["s3://bucket/other/absent.tar"]) is None


def test_a_stream_that_is_left_early_leaves_no_process(folder, monkeypatch):
    started = []
    real = remote.wds.gopen
    monkeypatch.setattr(remote, "_PATIENCE", 0.1)
    monkeypatch.setattr(remote.wds, "gopen", lambda shard: (started.append(real(shard)), started[-1])[1])
    items = open_source(f"pipe:cat {folder}/s0.tar; sleep 30").items()
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert started[0].proc.poll() is not None


def test_what_is_missing_is_said_before_anything_is_read(folder, monkeypatch):
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(folder))
    for location, words in (
        ("s3://bucket/{0..3}.tar", ["'aws'", "s3fs", "pip install s3fs"]),
        ("gs://bucket/0.tar", ["'gsutil'", "gcsfs"]),
        ("https://example.org/0.tar", ["'curl'"]),
        ("nowhere://0.tar", ["nowhere", "pipe:COMMAND nowhere://0.tar"]),
        ("s3://bucket/*.tar", ["braces"]),
    ):
        with pytest.raises(CoderError) as caught:
            open_source(location)
        assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), str(caught.value)


def test_a_file_may_not_name_remote_shards(folder, url, tmp_path, capsys):
    config = tmp_path / "given.toml"
    config.write_text(f'train_data = "{url}/s{{0..1}}.tar"\n')
    assert main(["train", "--config", str(config), "--model", "coder-tiny", "--dry-run", "--logs", str(tmp_path)]) == 2
    assert "give it again on the command line" in capsys.readouterr().err
