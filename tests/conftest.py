"""Shared by all tests: nothing is downloaded, threads are few, and a model small enough to train in seconds."""

import atexit
import functools
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import huge_pages

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are tiny: threads that wait for each other cost more

# The same few examples in every worker and run. `--hypothesis-profile=thorough` draws more, and others each time.
calm: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, max_examples=10, **calm)
settings.register_profile("thorough", max_examples=300, **calm)
settings.load_profile("repeatable")

TINY = {  # no BatchNorm, no dropout: a row's features do not depend on the other rows
    "embed_dim": 32,
    "vision_cfg": {"image_size": 64, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 40, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One worker a core, at most 8. Test files named on the command line run in this process, since a worker takes seconds to
    start; so do tests for a GPU, which workers would have to share."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    if all(".py" in argument for argument in config.args) or "gpu" in config.option.markexpr.replace("not gpu", ""):
        return 0
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


#: What takes longest begins first, so that no worker waits for another in the end.
LONG = ("test_python_blocks_run[True]",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name not in LONG)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported meanwhile is no garbage: looking for some takes 7 s. It stays: no collection of garbage has to visit it
    again, and processes are forked in a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    freeze()
    atexit.register(gc.unfreeze)  # libraries look for leaks when the process ends; pytest collects garbage often before that
    huge_pages.use()


known = 0  # modules at the last freeze


def freeze() -> None:
    global known
    gc.collect()
    gc.freeze()
    known = len(sys.modules)


def pytest_runtest_setup() -> None:
    """What tests have imported is no garbage either. transformers' and Lightning's trainers look for some in every training."""
    if len(sys.modules) > known + 200:
        freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Path of an open_clip model configuration of under a million parameters."""
    path = tmp_path_factory.mktemp("models") / "tiny-vit-for-tests.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture(scope="session", autouse=True)
def backward_before_compile() -> None:
    """Tests fork processes that train. A child cannot run a backward pass if its parent's first came after torch._dynamo was
    imported, which starts threads for it."""
    import torch

    torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(scope="session", autouse=True)
def cheap_repetitions() -> Iterator[None]:
    """What many tests repeat: CLIP's merges are parsed once (0.1 s), ``pip check``, which takes 10 s, finds nothing, and
    nothing is forced to disk, since no test cuts the power; the command's parser is built once (25 ms). The built-in scenes
    have 100 validation images: to encode all 500 takes seconds."""
    from open_clip.tokenizer import SimpleTokenizer

    from coder_plugin import cli
    from coder_plugin.data import scenes

    parse, parsed = SimpleTokenizer.__init__, {}

    def shared(self: SimpleTokenizer, *args: Any, **options: Any) -> None:
        key = repr((args, options))
        if key not in parsed:
            parse(self, *args, **options)
            parsed[key] = vars(self).copy()
        vars(self).update(parsed[key])

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert "check" in command, command
        return subprocess.CompletedProcess(command, 0, "No broken requirements found.\n", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coder_plugin.doctor.installation.subprocess", SimpleNamespace(run=run))
        patch.setattr(SimpleTokenizer, "__init__", shared)
        patch.setattr(cli, "build_parser", functools.cache(cli.build_parser))
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is no open file, too
        patch.setitem(scenes.DEFAULT_COUNTS, "val", 100)
        yield


@pytest.fixture(scope="session", autouse=True)
def without_report() -> Iterator[Any]:
    """Runs in tests and fixtures end without their report, which would take longer than they do."""
    from coder_plugin.report.callback import WriteReport

    write = WriteReport.on_train_end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriteReport, "on_train_end", lambda *_: None)
        yield write


@pytest.fixture
def with_report(without_report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of the trainer's report; its map is no t-SNE, which takes longer than the rest."""
    monkeypatch.setattr("coder_plugin.report.callback.WriteReport.on_train_end", without_report)
    monkeypatch.setattr("coder_plugin.report.sections.tsne", lambda vectors: vectors[:, :2])
