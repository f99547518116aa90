"""Packages, plugins and GPUs, of this installation and of others that are made up."""

from __future__ import annotations

import subprocess
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coder_plugin.doctor import installation
from coder_plugin.doctor.installation import check_gpus, check_packages, check_plugins
from tests.doctor.made import amiss


@pytest.mark.parametrize("asks_pip", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_this_installation(asks_pip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if asks_pip:
        monkeypatch.setattr(installation, "subprocess", subprocess)
    found = list(check_packages())
    assert all(each.level in ("ok", "warning") for each in found)
    [packages] = [each.text for each in found if each.name == "installation.packages"]
    assert f"torch {metadata.version('torch')}" in packages
    assert amiss(list(check_plugins())) == {}


def test_what_pip_check_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is a problem, that of a package that we require a warning; a build of FAISS for GPUs stands in for faiss-cpu."""
    lines = [
        "coder-plugin 1 has requirement timm>=1, but you have timm 0.9.",
        "coder-plugin 1 requires faiss-cpu, which is not installed.",
        "torch 2.1 requires sympy, which is not installed.",
        "theirs 3 requires absent, which is not installed.",
    ]
    done = SimpleNamespace(returncode=1, stdout="\n".join(lines), stderr="")
    monkeypatch.setattr(installation.subprocess, "run", lambda *_, **__: done)
    distributions = [("coder-plugin", "1"), ("Torch", "2.1"), ("faiss-gpu", "1.9"), ("theirs", "3")]
    monkeypatch.setattr(
        installation.metadata, "distributions", lambda: [SimpleNamespace(name=n, version=v) for n, v in distributions]
    )
    monkeypatch.setattr(installation.metadata, "requires", lambda name: ["torch>=2", "timm>=1", 'x-y>1; extra == "x"'])
    found = list(check_packages())
    assert [(each.level, each.text) for each in found[1:]] == [
        ("ok", "coder-plugin 1, torch 2.1"), ("problem", lines[0]), ("warning", lines[2]), ("note", lines[3])
    ]  # fmt: skip
    del distributions[2]
    assert "installation.packages.coder-plugin" in [each.name for each in check_packages() if "faiss-cpu" in each.text]
    done.stdout, done.stderr = "", "No module named pip"
    assert [(each.level, each.text) for each in check_packages()][2:] == [
        ("note", "only coder-plugin's own requirements were checked: No module named pip"),
        ("problem", "coder-plugin requires timm>=1, which is not installed"),
    ]
    done.returncode, done.stdout = 0, "No broken requirements found."
    assert all(each.level == "ok" for each in check_packages())
    distributions.clear()
    assert [each.name for each in check_packages()] == ["installation.ours"]


def test_a_plugin_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def plugin(distribution: str, error: str) -> Any:
        return SimpleNamespace(group="losses", name="x", distribution=distribution, version="1", error=error)

    plugins = [plugin("theirs", "no module"), plugin("coder-plugin", "gone"), plugin("theirs", "")]
    monkeypatch.setattr("coder_plugin.registry.list_plugins", lambda check: plugins)
    theirs, ours, total = check_plugins()
    assert (theirs.level, ours.level) == ("warning", "problem") and "no module" in theirs.text
    assert total.text == "1 plugins load, also from theirs"


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(installation.shutil, "which", lambda name: None)
    assert [each.name for each in check_gpus()] == ["machine.gpu.none"]
    monkeypatch.setattr(installation.shutil, "which", lambda name: "/bin/x")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in next(check_gpus()).text

    def broken() -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", broken)
    assert "the driver is too old" in next(check_gpus()).text and next(check_gpus()).level == "warning"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (2**30, 2**31))
    assert next(check_gpus()).text == "GPU 0, H: 1,024 of 2,048 MiB free"
