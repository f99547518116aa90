"""An index that is killed while it is built, and one whose bits flip: never wrong content."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coder_plugin.errors import CoderError
from coder_plugin.index import build, training, vectors_file
from coder_plugin.index.build import build_index
from coder_plugin.index.manifest import KINDS
from coder_plugin.index.records_file import RecordsFile
from coder_plugin.index.search import Index
from coder_plugin.index.vectors import Vectors
from tests.evaluation.test_evaluate import make_encoder
from tests.training import region_data

MODEL = {"name": "x", "fingerprint": "f" * 64}
FIRST = "segments/00000"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return region_data.write_precomp(tmp_path_factory.mktemp("made"))


@pytest.fixture(autouse=True, scope="module")
def small_files() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "ROWS_PER_FILE", 5)  # of 24 images, a batch to a file
        yield


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "index"
    build_index(folder, *make_encoder(data), model=MODEL)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, but of the manifest, which has the time."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("manifest.json", ".lock")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(files)}


# -- kills ------------------------------------------------------------------------------------------------------------------

#: Audit events of what changes a folder; fsync has none and is replaced.
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "shutil.move")


def in_child(folder: Path, work: Callable[[], object], kill_at: int | None) -> int:
    """Run ``work`` in a forked process; at the numbered change of ``folder`` it kills itself.

    Returns:
        The number of changes, if none is given; else 0 if it ended before.
    """
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            count = 0

            def change(*_: Any) -> None:
                nonlocal count
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            def hook(event: str, values: tuple) -> None:
                if event not in EVENTS or not str(values[0]).startswith(str(folder)):
                    return
                reads = event == "open" and not (isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR))
                if not reads:
                    change()

            fsync = os.fsync

            def counted(descriptor: int) -> None:
                change()
                fsync(descriptor)

            os.fsync = counted  # type: ignore[assignment]
            sys.addaudithook(hook)
            work()
            os.write(send, str(count).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(send)
    with open(receive) as file:
        text = file.read()
    _, code = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(code)
    assert code in (0, -signal.SIGKILL), code
    return int(text or 0)


def run_kills(data: str, whole: Path, tmp_path: Path, step: int) -> tuple[int, int]:
    """Kill a build at every ``step``-th change, and continue it; returns the number of changes and of kills."""
    encoder, source = make_encoder(data)

    def work(folder: Path) -> Callable[[], object]:
        return lambda: build_index(folder, encoder, source, model=MODEL)

    points = in_child(tmp_path / "count", work(tmp_path / "count"), None)
    expected = contents(whole)
    assert contents(tmp_path / "count") == expected
    kills = range(1, points + 1, step)
    for kill_at in kills:
        folder = tmp_path / f"killed-{kill_at}"
        assert in_child(folder, work(folder), kill_at) == 0, f"not killed at {kill_at} of {points}"
        try:  # what is there is an index of right content, or none
            Index(folder)
        except CoderError as error:
            assert "not finished" in str(error) or "is not an index" in str(error), f"{kill_at}: {error}"
        if kill_at % 3 == 0:  # a chain: the second build is killed too
            in_child(folder, work(folder), 1 + kill_at % 17)
        in_child(folder, work(folder), None)
        assert contents(folder) == expected, kill_at
        Index(folder).close()
        shutil.rmtree(folder)
    return points, len(kills)


def test_killed_builds_continue(data: str, whole: Path, tmp_path: Path) -> None:
    points, _ = run_kills(data, whole, tmp_path, step=31)
    assert points >= 50


@pytest.mark.slow
def test_builds_killed_at_every_change_continue(data: str, whole: Path, tmp_path: Path) -> None:
    points, kills = run_kills(data, whole, tmp_path, step=1)
    print(f"{kills} kills at {points} writes, renames, removals and fsyncs of a build, every third twice: all equal")


def test_a_full_disk_leaves_what_is_whole(data: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the disk's reason; with room again the build continues."""
    from coder_plugin import files

    real, calls = files.fsync_path, []

    def full(path: Any) -> None:
        calls.append(path)
        if len(calls) == 12:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path)

    with monkeypatch.context() as patch, pytest.raises((CoderError, OSError), match="No space left on device"):
        patch.setattr(files, "fsync_path", full)
        build_index(tmp_path / "index", *make_encoder(data), model=MODEL)
    build_index(tmp_path / "index", *make_encoder(data), model=MODEL)
    assert contents(tmp_path / "index") == contents(whole)


# -- flipped bits -----------------------------------------------------------------------------------------------------------


def flip(path: Path, draw: random.Random, *, first: int | None = None) -> None:
    """Flip a bit, of the first so many bytes."""
    content = bytearray(path.read_bytes())
    bit = draw.randrange(8 * min(first or len(content), len(content)))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def run_flips(whole: Path, tmp_path: Path, draws: int, seed: int) -> Counter[str]:
    """One bit of one file of a finished index, but of the notes that only a build reads: refused by the file's name."""
    results: Counter[str] = Counter()
    draw = random.Random(seed)
    names = sorted(name for name in [*contents(whole), "manifest.json"] if Path(name).name != "segment.json")
    for number in range(draws):
        folder = tmp_path / "index"
        shutil.copytree(whole, folder)
        name = names[number % len(names)]
        flip(folder / name, draw)
        try:
            Index(folder, verify=True)
        except CoderError as error:
            assert Path(name).name in str(error), f"{name}: {error}"
            results[name] += 1
        else:
            pytest.fail(f"a flipped bit of {name} was not seen (draw {number} of seed {seed})")
        assert set(contents(folder)) == set(contents(whole))  # nothing is deleted
        shutil.rmtree(folder)
    return results


def run_unfinished_flips(data: str, whole: Path, tmp_path: Path, draws: int, seed: int) -> Counter[str]:
    """One bit of a file of an unfinished build: the command names the file; without it the build ends as one never stopped."""
    encoder, source = make_encoder(data)
    begun = tmp_path / "begun"
    at = in_child(tmp_path / "count", lambda: build_index(tmp_path / "count", encoder, source, model=MODEL), None) // 2
    in_child(begun, lambda: build_index(begun, encoder, source, model=MODEL), at)
    endings = (".parquet", ".safetensors", ".json")
    files = sorted(path.relative_to(begun) for path in begun.rglob("*.*") if path.suffix in endings)
    assert len(files) > 2
    results: Counter[str] = Counter()
    draw = random.Random(seed)
    for number in range(draws):
        folder = tmp_path / "index"
        shutil.copytree(begun, folder)
        name = files[number % len(files)]
        flip(folder / name, draw)
        try:
            build_index(folder, encoder, source, model=MODEL)
            results["survived"] += 1
        except CoderError as error:
            assert name.name in str(error) or str(folder) in str(error), f"{name}: {error}"
            assert (folder / name).is_file()
            (folder / name).unlink()  # as the message says
            if name.suffix == ".json":
                shutil.rmtree(folder)
            build_index(folder, encoder, source, model=MODEL)
            results["refused"] += 1
        assert contents(folder) == contents(whole), f"{name}, draw {number} of seed {seed}"
        shutil.rmtree(folder)
    return results


def test_flipped_bits_are_named(data: str, whole: Path, tmp_path: Path) -> None:
    assert run_flips(whole, tmp_path, 16, seed=0).total() == 16
    assert run_unfinished_flips(data, whole, tmp_path, 4, seed=0).total() == 4


@pytest.mark.slow
def test_many_flipped_bits_are_named(data: str, whole: Path, tmp_path: Path) -> None:
    print("finished:", dict(run_flips(whole, tmp_path, 200, seed=1)))
    print("unfinished:", dict(run_unfinished_flips(data, whole, tmp_path, 40, seed=1)))


def test_no_verification_still_reads_nothing_wrong(whole: Path, tmp_path: Path) -> None:
    """Without checksums, sizes, types and rows are still checked: an error, or results of the right form."""
    draw, refused = random.Random(3), 0
    for number in range(60):
        folder = tmp_path / "index"
        shutil.copytree(whole, folder)
        flip(folder / FIRST / ("records.sqlite", "images.faiss")[number % 2], draw, first=(None, 120)[number // 2 % 2])
        try:
            index = Index(folder)
            query = index.vector(0)
            for kind in KINDS:
                scores, rows = index.search(query, 3, kind=kind)
                assert rows.shape == (1, 3)
            index.records.captions(rows[0].tolist())
            index.records.images(range(24))
            index.close()
        except CoderError as error:
            assert str(folder) in str(error)
            refused += 1
        shutil.rmtree(folder)
    assert refused


# -- what rests on FAISS: the files of indexes that are not flat ---------------------------------------------------------------

FACTORIES = ("HNSW8", "IVF4,Flat", "PQ4x4", "OPQ4,IVF4,PQ4x4", "SQ8", "IVF4,SQ8", "PCA8,Flat", "Flat")


def mutate(content: bytes, draw: random.Random) -> bytes:
    """A flipped bit, another number, or the beginning."""
    data = bytearray(content)
    place = draw.randrange(min(len(data) - 8, draw.choice((60, 200, len(data)))))
    kind = draw.randrange(3)
    if kind == 0:
        data[place] ^= 1 << draw.randrange(8)
    elif kind == 1:
        data[place : place + 8] = struct.pack("<q", draw.choice((-1, 2**31, 2**40, 2**62, 1 << 20, 7)))
    return bytes(data[: draw.randrange(len(data))] if kind == 2 else data)


def run_mutations(tmp_path: Path, each: int, seed: int) -> Counter[str]:
    import faiss

    draw, results = random.Random(seed), Counter[str]()
    array = np.random.default_rng(0).normal(size=(300, 1, 16)).astype("float32")
    for factory in FACTORIES:
        path = tmp_path / "images.faiss"
        vectors_file.write(path, [array[:, 0]], training.train(factory, 16, lambda _: array[:, 0]))
        content = path.read_bytes()
        for _ in range(each):
            path.write_bytes(mutate(content, draw))
            pid = os.fork()
            if pid == 0:
                status = 9
                try:
                    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
                    signal.alarm(10)
                    faiss.omp_set_num_threads(1)
                    opened = Vectors([path], [300], views=1, dimensions=16, flat=factory == "Flat", gpu=False)
                    scores, rows = opened.search(array[:3, 0], 5)
                    status = 0 if rows.max() < 300 and not np.isnan(scores).any() else 8
                except CoderError:
                    status = 2
                finally:
                    os._exit(status)
            _, code = os.waitpid(pid, 0)
            results[f"{'read' if code == 0 else 'refused' if code == 512 else os.waitstatus_to_exitcode(code)}"] += 1
    return results


HARDENED = pytest.mark.skipif("not hasattr(__import__('faiss'), 'set_deserialization_loop_limit')", reason="an older FAISS")


@HARDENED
def test_faiss_refuses_damaged_files(tmp_path: Path) -> None:
    assert set(run_mutations(tmp_path, 8, seed=0)) <= {"read", "refused"}


@HARDENED
@pytest.mark.slow
def test_faiss_refuses_many_damaged_files(tmp_path: Path) -> None:
    results = run_mutations(tmp_path, 100, seed=1)
    print(f"{len(FACTORIES)} kinds of FAISS files, changed: {dict(results)}")
    assert set(results) <= {"read", "refused"}


# -- a query that does not end -----------------------------------------------------------------------------------------------


def test_a_query_ends_within_its_time(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coder_plugin.index.records.SECONDS", 0.2)
    opened = RecordsFile(whole / FIRST / "records.sqlite")
    started = time.monotonic()
    with pytest.raises(CoderError, match=r"records.sqlite is not a file of an index's records: a query took over 0.2 s"):
        opened._query("WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT MAX(n) FROM r")
    assert time.monotonic() - started < 5
    assert opened.rows_of(["nobody"]) == {}  # and the next one has its own time
    opened.close()


def test_the_records_cannot_be_written(whole: Path) -> None:
    opened = RecordsFile(whole / FIRST / "records.sqlite")
    with pytest.raises(CoderError, match="readonly"):
        opened._query("DELETE FROM images")
