"""SIGKILL at changes that embed and index make on disk, and at random instants; the same command ends it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.search.index import Index
from tests.reliability.hostile import honest_export
from tests.search.made import embed

COMMANDS = ("embed", "data", "embeddings", "add", "add --replace", "remove")
#: An error of a folder that is no index yet.
NONE_YET = ("holds no index", "is not an index")
#: Audit events of what changes a folder; fsync has none and is replaced.
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.rmdir", "shutil.rmtree", "shutil.move")


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
                if event not in EVENTS or not str(values[1 if event == "os.link" else 0]).startswith(str(folder)):
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings, others to add, pictures, and an index of which images were removed."""
    from coder_plugin.data.scenes import open_scenes

    folder = tmp_path_factory.mktemp("made")
    embed(folder / "embeddings", tokens=True)
    embed(folder / "new", units=2, seed=1, name="b", tokens=True)
    embed(folder / "same", units=2, seed=2, tokens=True)  # of the same keys
    (folder / "pictures").mkdir()
    for number in range(6):
        open_scenes("val")[number].load().save(folder / "pictures" / f"{number}.png")
    work(folder, "embeddings", folder / "index")()
    work(folder, "remove", folder / "index", "a-1-1", "a-1-2")()
    return folder


def work(made: Path, command: str, index: Path, *keys: str) -> Callable[[], None]:
    """What runs a command."""
    data = [str(honest_export()), "--data", str(made / "pictures"), "--workers", "0", "--output", str(index)]
    arguments = {
        "embed": ["embed", *data, "--rows-per-file", "2"],
        "data": ["index", *data],
        "embeddings": ["index", "--embeddings", str(made / "embeddings"), "--output", str(index), "--factory", "IVF4,Flat"],
        "add": ["index", "add", str(index), str(made / "new")],
        "add --replace": ["index", "add", str(index), str(made / "same"), "--replace"],
        "remove": ["index", "remove", str(index), *(each for key in keys or ("a-0-0", "a-2-1") for each in ("--key", key))],
    }[command]

    def run() -> None:
        assert main(arguments) == 0

    return run


def described(folder: Path) -> dict[str, Any] | None:
    """The rows and vectors of an index, or the bytes of embeddings; None where there is none yet."""
    if not (folder / "index.json").exists():
        files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}
        return files or None
    index = Index(folder, verify=True)
    found: dict[str, Any] = {"note": json.loads((folder / "index.json").read_text())["options"]}
    for image in index.records.images(range(index.size("images"))):
        vectors = [index.vector(image.row).tobytes(), index.vectors["images"].gather([image.row]).tobytes()]
        tokens = {name: value.numpy().tobytes() for name, value in index.items("images", np.array([image.row])).items()}
        found[f"{image.row} {image.key}"] = (index.records.captions_of(image.row), vectors, tokens)
    return found


def check(made: Path, command: str, folder: Path, before: dict[str, Any] | None, whole: dict[str, Any]) -> None:
    """After a kill: the old index or the new one, whole; and the new one when the command has run again."""
    if command != "embed":
        try:
            Index(folder, verify=True)
        except CoderError as error:
            assert before is None and any(text in str(error) for text in NONE_YET), error
        assert described(folder) in (before, whole, None) or before is None
    finished = described(folder) == whole
    try:
        work(made, command, folder)()
    except AssertionError:
        assert finished and command == "add"  # a second time its images are there
    assert described(folder) == whole
    assert not list(folder.rglob(".*.writing"))
    if command != "embed":
        note = json.loads((folder / "index.json").read_text())
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert files == {*note["sizes"], *note["embeddings"], "index.json", ".lock"}
    shutil.rmtree(folder)


def start(made: Path, command: str, folder: Path) -> dict[str, Any] | None:
    """What is there before a command, in ``folder``; its description."""
    if command in ("embed", "data", "embeddings"):
        return None
    shutil.copytree(made / "index", folder)
    return described(folder)


def kill_at_changes(made: Path, command: str, tmp_path: Path, step: int) -> tuple[int, int]:
    count = tmp_path / "count"
    start(made, command, count)
    points = in_child(count, work(made, command, count), None)
    whole = described(count)
    assert whole is not None
    kills = range(1, points + 1, step)
    for kill_at in kills:
        folder = tmp_path / f"killed-{kill_at}"
        before = start(made, command, folder)
        assert in_child(folder, work(made, command, folder), kill_at) == 0, f"not killed at {kill_at} of {points}"
        check(made, command, folder, before, whole)
    return points, len(kills)


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=[pytest.mark.slow] * (command not in ("data", "add"))) for command in COMMANDS],
)
def test_killed_at_some_changes(made: Path, command: str, tmp_path: Path) -> None:
    points, _ = kill_at_changes(made, command, tmp_path, step=41)
    assert points >= 10


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_every_change(made: Path, command: str, tmp_path: Path) -> None:
    points, kills = kill_at_changes(made, command, tmp_path, step=1)
    print(f"{command}: {kills} kills at {points} changes")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_random_instants(made: Path, command: str, tmp_path: Path) -> None:
    """Also within a write of Arrow or FAISS; a chain of two kills."""
    count, draw = tmp_path / "count", random.Random(7)
    start(made, command, count)
    started = time.monotonic()
    work(made, command, count)()
    whole = described(count)
    assert whole is not None
    seconds, killed = max(0.1, time.monotonic() - started), 0
    for number in range(40):
        folder = tmp_path / str(number)
        before = start(made, command, folder)
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    work(made, command, folder)()
                finally:
                    os._exit(0)
            time.sleep(draw.uniform(0, 1.2 * seconds))
            os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            killed += status == -signal.SIGKILL
            if status == 0:
                break
        folder.mkdir(exist_ok=True)
        check(made, command, folder, before, whole)
    print(f"{command}: {killed} kills at random instants in {seconds:.1f} s")
