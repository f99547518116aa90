"""A small index of pictures with captions, some of them hostile, for the tests of its server."""

from __future__ import annotations

import csv
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests import fresh
from tests.report.conftest import browser  # noqa: F401

COUNT = 30
#: What a page would run if it were not escaped.
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> \" ' {{7*7}} </title>"
SOURCE = "found <b>'there'</b>"
NAME = "<img src=x onerror=alert(3)>.png"


class Made(NamedTuple):
    """An index and the folder of its pictures."""

    index: Path
    pictures: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Thirty scenes as PNG files, every third from the source "drawn"; the keys are their absolute paths."""
    import coder_plugin
    from coder_plugin.cli import main
    from coder_plugin.data.scenes import open_scenes
    from coder_plugin.pretrained.export import export_model
    from coder_plugin.search.build import build_index

    folder = tmp_path_factory.mktemp("served")
    pictures = folder / "pictures"
    pictures.mkdir()
    scenes = open_scenes("val")
    with open(pictures / "all.csv", "w", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["filepath", "title", "source", "number", "note"])
        for number in range(COUNT):
            path = pictures / (NAME if number == 3 else f"{number:03d}.png")
            scenes[number].load().save(path)
            captions = [HOSTILE] if number == 3 else scenes[number].captions[:2]
            source = "" if number == 5 else "drawn" if number % 3 == 0 else SOURCE
            table.writerows([[str(path), caption, source, number, f"note {number}"] for caption in captions])
    torch.manual_seed(0)
    model = coder_plugin.create_model("coder-tiny", loss="dcl")
    with torch.no_grad():
        model.visual.conv1.weight *= 100  # vectors of an untrained tower are equal but for rounding
    export_model(model, folder / "export")
    flags = ["--data", str(pictures / "all.csv"), "--output", str(folder / "embeddings"), "--workers", "0"]
    assert main(["embed", str(folder / "export"), *flags, "--columns", "source", "number:int64", "note"]) == 0
    build_index(folder / "index", folder / "embeddings")
    return Made(folder / "index", pictures)


class Live(NamedTuple):
    """A running server."""

    url: str
    process: Any
    errors: Path


@contextmanager
def running(folder: Path, *flags: str, main: Callable[[list[str]], int] | None = None) -> Iterator[Live]:
    """``coder-plugin serve`` in a process of its own, at any free port, until the end of the context.

    ``main`` is called in place of ``coder_plugin.cli.main``.
    """
    output, errors = folder / "output", folder / "errors"
    process = fresh.context().Process(target=_serve, args=([*flags, "--port", "0"], str(output), str(errors), main))  # type: ignore[attr-defined]
    process.start()
    deadline = time.monotonic() + 60
    while not output.is_file() or "serving at " not in output.read_text():
        assert process.is_alive() and time.monotonic() < deadline, errors.read_text()
        time.sleep(0.02)
    try:
        yield Live(output.read_text().partition("serving at ")[2].split()[0], process, errors)
    finally:
        process.terminate()
        process.join(20)


def _serve(arguments: list[str], output: str, errors: str, main: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it begins in the background ignore it
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    import sys

    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    from coder_plugin import cli

    sys.exit((main or cli.main)(["serve", *arguments]))
