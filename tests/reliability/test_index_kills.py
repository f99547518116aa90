"""SIGKILL at every change that an index's commands make on disk, and at random instants; the same command ends it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.index import training
from coder_plugin.index.search import Index
from tests.index.made_embeddings import embed
from tests.reliability.hostile import honest_export
from tests.reliability.test_index_faults import contents, in_child

COMMANDS = ("data", "embeddings", "add", "add --replace", "remove")
BUILDS = ("data", "embeddings")
#: An error of a folder that is no index yet, and of a change that had been made when it was killed.
NONE_YET, DONE = ("is not finished", "is not an index"), "of these images already"


@pytest.fixture(autouse=True, scope="module")
def few_to_train_on() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "LEAST", 2)
        yield


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
    segments = ["--segment-size", "40"]
    arguments = {
        "data": [str(honest_export()), "--data", str(made / "pictures"), "--workers", "0", "--output", str(index)],
        "embeddings": ["--embeddings", str(made / "embeddings"), "--output", str(index), "--factory", "IVF4,Flat", *segments],
        "add": ["add", str(index), str(made / "new"), *segments],
        "add --replace": ["add", str(index), str(made / "same"), "--replace", *segments],
        "remove": ["remove", str(index), *(each for key in keys or ("a-0-0", "a-4-1") for each in ("--key", key))],
    }[command]

    def run() -> None:
        assert main(["index", *arguments]) == 0

    return run


def described(index: Path) -> dict[str, Any]:
    """The manifest without the times."""
    manifest = json.loads((index / "manifest.json").read_text())
    return {name: value for name, value in manifest.items() if name not in ("manifest_sha256", "made", "changed")}


def check(made: Path, command: str, index: Path, before: dict[str, Any] | None, whole: Path) -> None:
    """After a kill: the old index or the new one, whole; and the new one when the command has run again."""
    try:
        opened = Index(index, verify=True)
    except CoderError as error:
        assert before is None and any(text in str(error) for text in NONE_YET), error
        finished = False
    else:
        assert opened.search(np.ones((1, next(iter(opened.vectors.values())).dimensions)), 5)[1].shape == (1, 5)
        opened.close()
        finished = described(index) == described(whole)
        assert finished or described(index) == before
    if not finished or command != "add --replace":  # that would replace what it has added
        again = work(made, command, index)
        try:
            again()
        except AssertionError:
            assert finished and command == "add"  # a second time its images are there
    assert described(index) == described(whole)
    if command in BUILDS or not finished:
        assert contents(index) == contents(whole)
    shutil.rmtree(index)


def start(made: Path, command: str, folder: Path) -> dict[str, Any] | None:
    """What is there before a command, in ``folder``; the index's description."""
    if command in BUILDS:
        return None
    shutil.copytree(made / "index", folder)
    return described(folder)


def kill_at_changes(made: Path, command: str, tmp_path: Path, step: int) -> tuple[int, int]:
    whole, count = tmp_path / "whole", tmp_path / "count"
    start(made, command, whole)
    work(made, command, whole)()
    start(made, command, count)
    points = in_child(count, work(made, command, count), None)
    assert described(count) == described(whole) and contents(count) == contents(whole)
    kills = range(1, points + 1, step)
    for kill_at in kills:
        index = tmp_path / f"killed-{kill_at}"
        before = start(made, command, index)
        assert in_child(index, work(made, command, index), kill_at) == 0, f"not killed at {kill_at} of {points}"
        check(made, command, index, before, whole)
    return points, len(kills)


@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_some_changes(made: Path, command: str, tmp_path: Path) -> None:
    points, _ = kill_at_changes(made, command, tmp_path, step=13 if command in BUILDS else 5)
    assert points >= 10


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_every_change(made: Path, command: str, tmp_path: Path) -> None:
    points, kills = kill_at_changes(made, command, tmp_path, step=1)
    print(f"{command}: {kills} kills at {points} changes")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_random_instants(made: Path, command: str, tmp_path: Path) -> None:
    """Also within a write of SQLite or FAISS; a chain of two kills."""
    whole, draw = tmp_path / "whole", random.Random(7)
    start(made, command, whole)
    started = time.monotonic()
    work(made, command, whole)()
    seconds, killed = max(0.1, time.monotonic() - started), 0
    for number in range(40):
        index = tmp_path / str(number)
        before = start(made, command, index)
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    work(made, command, index)()
                finally:
                    os._exit(0)
            time.sleep(draw.uniform(0, 1.2 * seconds))
            os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            killed += status == -signal.SIGKILL
            if status == 0 or command == "add --replace":  # it may have ended before the kill; a second one would replace again
                break
        check(made, command, index, before, whole)
    print(f"{command}: {killed} kills at random instants in {seconds:.1f} s")


def test_another_change_after_a_killed_one(made: Path, tmp_path: Path) -> None:
    """The segment that a killed change has written does not become a part of the next."""
    whole = tmp_path / "whole"
    for index in (whole, tmp_path / "killed"):
        start(made, "add", index)
    points = in_child(whole, work(made, "add", whole), None)
    shutil.rmtree(whole)
    start(made, "add", whole)
    assert in_child(tmp_path / "killed", work(made, "add", tmp_path / "killed"), points - 4) == 0
    assert (tmp_path / "killed" / "segments" / "00003").is_dir()
    for command in ("remove", "add --replace"):
        for index in (whole, tmp_path / "killed"):
            work(made, command, index)()
    assert described(whole) == described(tmp_path / "killed") and contents(whole) == contents(tmp_path / "killed")
