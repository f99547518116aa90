"""Packages, plugins and GPUs, of this installation and of others that are made up."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coder_plugin.doctor import installation
from coder_plugin.doctor.installation import check_gpus, check_packages, check_plugins
from tests.doctor.made import amiss


def others(patch: pytest.MonkeyPatch, versions: dict[str, str], requires: dict[str, list[str]]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    patch.setattr(installation.metadata, "version", version)
    patch.setattr(installation.metadata, "requires", lambda name: version(name) and requires.get(name))


def test_this_installation() -> None:
    found = list(check_packages())
    assert all(each.level in ("ok", "warning") for each in found)
    [packages] = [each.text for each in found if each.name == "installation.packages"]
    assert f"torch {metadata.version('torch')}" in packages
    assert amiss(list(check_plugins())) == {}


def test_missing_old_and_conflicting_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ["torch>=2", "timm>=1", "absent", 'extra-one; extra == "x"', 'old; python_version < "3"', "faiss-cpu>=1.8"]
    versions = {"coder-plugin": "1", "torch": "2.1", "timm": "0.9", "faiss-gpu": "1.9", "numpy": "3"}
    others(monkeypatch, versions, {"coder-plugin": ours, "torch": ["numpy<3", "sympy"], "faiss-cpu": ["x"]})
    found = {each.name: each for each in check_packages() if each.level != "ok"}
    assert {name.rpartition(".")[2]: each.level for name, each in found.items()} == {
        "timm": "problem", "absent": "problem", "numpy": "warning", "sympy": "warning"
    }  # fmt: skip
    assert "timm 0.9 is installed" in found["installation.packages.timm"].text
    assert "absent is not installed" in found["installation.packages.absent"].text
    assert 'pip install "torch" "numpy<3"' in found["installation.packages.numpy"].do
    others(monkeypatch, {}, {})
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
