"""Packages, libraries and machine: made to be missing, old, in conflict or too small."""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coder_plugin.config import TrainConfig
from coder_plugin.doctor import installation, machine
from coder_plugin.doctor.findings import Finding, guarded
from tests.doctor.made import amiss


def find(check: Any, *arguments: Any) -> dict[str, Finding]:
    return amiss(guarded("part", check, *arguments))


def distributions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], requires: dict[str, list[str]]) -> None:
    """Only these are installed."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    def required(name: str) -> list[str]:
        version(name)
        return requires.get(name, [])

    extras = SimpleNamespace(get_all=lambda field: ["lora", "test"])
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", required)
    monkeypatch.setattr(metadata, "metadata", lambda name: extras)
    monkeypatch.setattr(
        metadata, "distributions", lambda: [SimpleNamespace(metadata={"Name": name}) for name in versions]
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: None)


OURS = {"coder-plugin": ["torch>=2.6", "torchvision>=0.21", "faiss-cpu>=1.8", 'peft>=0.13; extra == "lora"']}
SOUND = {"coder-plugin": "0.1", "torch": "2.9", "torchvision": "0.24", "faiss-cpu": "1.9", "peft": "0.14"}


def test_sound_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    distributions(monkeypatch, SOUND, OURS)
    found = guarded("part", installation.check_packages)
    assert amiss(found) == {}
    assert "torch 2.9, torchvision 0.24, faiss-cpu 1.9" in [each.text for each in found]
    assert "installed extras: lora" in [each.text for each in found]
    distributions(monkeypatch, {**SOUND, "faiss-gpu-cu12": "1.9"} | {"faiss-cpu": "1.9"}, OURS)
    assert find(installation.check_packages) == {}


def test_faiss_for_gpus_stands_in_for_that_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: version for name, version in SOUND.items() if name != "faiss-cpu"}
    distributions(monkeypatch, {**others, "faiss-gpu-cu12": "1.9"}, OURS)
    assert find(installation.check_packages) == {}
    distributions(monkeypatch, others, OURS)
    assert list(find(installation.check_packages)) == ["installation.packages.faiss-cpu"]


def test_missing_old_and_conflicting_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = {**OURS, "torchvision": ["torch==2.8", 'scipy; extra == "scipy"', "numpy"]}
    versions = {name: version for name, version in SOUND.items() if name not in ("peft", "faiss-cpu")} | {
        "torch": "2.5"
    }
    distributions(monkeypatch, versions, requires)
    found = find(installation.check_packages)
    assert found.keys() == {
        "installation.packages.faiss-cpu",
        "installation.packages.torch",
        "installation.conflict.torchvision",
        "installation.extras.absent",
    }
    assert found["installation.packages.faiss-cpu"].do == 'pip install "faiss-cpu>=1.8"'
    assert found["installation.packages.torch"].text == "torch 2.5 is installed, >=2.6 is needed"
    assert "torchvision 0.24 needs torch==2.8, but torch 2.5" in found["installation.conflict.torchvision"].text
    assert "lora (peft): --lora-rank" in found["installation.extras.absent"].text
    distributions(monkeypatch, {"torch": "2.9"}, {})
    assert list(find(installation.check_packages)) == ["installation.ours"]


def test_a_package_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    distributions(monkeypatch, SOUND, OURS)

    def fail(name: str) -> None:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms\ndoes not exist")

    monkeypatch.setattr(importlib, "import_module", fail)
    found = find(installation.check_packages)
    assert list(found) == ["installation.packages.torchvision"]
    assert "RuntimeError: operator torchvision::nms does not exist" in found["installation.packages.torchvision"].text


def test_the_libraries_here_work() -> None:
    found = guarded("part", installation.check_libraries)
    assert [each for each in found if each.level == "problem"] == []
    assert {"installation.torchvision", "installation.faiss", "installation.plugins"} <= {each.name for each in found}


def test_libraries_that_do_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    import faiss

    from coder_plugin import registry

    monkeypatch.setattr(faiss, "IndexFlatIP", lambda dim: (_ for _ in ()).throw(ImportError("libopenblas")))
    theirs = registry.Plugin(group="losses", name="x", distribution="theirs", version="1", target="a:b", error="gone")
    monkeypatch.setattr(registry, "list_plugins", lambda check: [theirs])
    found = find(installation.check_libraries)
    assert found["installation.faiss"].level == "problem" and "libopenblas" in found["installation.faiss"].text
    assert found["installation.plugin"].level == "warning" and "theirs" in found["installation.plugin"].do


def test_faiss_for_cpus_over_that_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import faiss

    monkeypatch.setattr(installation, "_faiss_distributions", lambda: ["faiss-cpu", "faiss-gpu"])
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    found = find(installation.check_libraries)["installation.faiss.cpu"]
    assert found.level == "warning" and found.do == "pip install --force-reinstall --no-deps faiss-gpu"
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)  # the extra gpu installs it last
    assert "installation.faiss.cpu" not in find(installation.check_libraries)
    monkeypatch.delattr(faiss, "index_factory")
    found = find(installation.check_libraries)["installation.faiss"]
    assert found.level == "problem" and found.do == "pip install --force-reinstall --no-deps faiss-gpu"


def config(**options: Any) -> TrainConfig:
    return TrainConfig().with_options(**options)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No GPU and no driver; the file that would show one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(machine, "NVIDIA", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "version"


def test_no_gpu(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(find(machine.check_gpus, config())) == ["machine.gpu.none"]
    found = find(machine.check_gpus, config(precision="amp"))
    assert found["machine.precision"].level == "problem"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert list(find(machine.check_gpus, config())) == ["machine.gpu.apple"]


def test_a_gpu_that_torch_cannot_use(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu.write_text("NVRM version")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert list(find(machine.check_gpus, config())) == ["machine.gpu.unused"]
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)")

    monkeypatch.setattr(torch.cuda, "init", init)
    found = find(machine.check_gpus, config())
    assert list(found) == ["machine.gpu.driver"] and "found version 11040" in found["machine.gpu.driver"].text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(find(machine.check_gpus, config())) == ["machine.gpu.hidden"]


ones = torch.ones


class Cuda:
    """Stands in for one GPU, on which tensors are the CPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int, bf16: bool = True, works: bool = True) -> None:
        known = {
            "is_available": True,
            "device_count": 1,
            "get_device_name": "Made",
            "get_device_capability": (7, 5),
            "get_arch_list": ["sm_90"],
            "mem_get_info": (free, 100),
            "is_bf16_supported": bf16,
        }
        for name, value in known.items():
            monkeypatch.setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)

        def made(*shape: int, device: Any) -> torch.Tensor:
            if not works:
                raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
            return ones(*shape)

        monkeypatch.setattr(torch, "ones", made)


def test_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, free=90)
    assert find(machine.check_gpus, config()) == {}
    Cuda(monkeypatch, free=9, bf16=False)
    assert find(machine.check_gpus, config()).keys() == {"machine.gpu.busy", "machine.precision"}
    assert find(machine.check_gpus, config(precision="amp")).keys() == {"machine.gpu.busy"}


def test_a_gpu_that_torch_was_not_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, free=90, works=False)
    found = find(machine.check_gpus, config())["machine.gpu"]
    assert found.level == "problem" and "no kernel image" in found.text and "7.5 (this one: sm_90)" in found.do


def test_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import resource

    plenty = SimpleNamespace(free=1 << 40)
    monkeypatch.setattr("shutil.disk_usage", lambda path: plenty)
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 8192))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    logs = {"logs": str(tmp_path / "new" / "logs")}
    assert find(machine.check_room, config(**logs)) == {} and not (tmp_path / "new").exists()
    assert list(find(machine.check_room, config(workers=9, **logs))) == ["machine.workers"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert list(find(machine.check_room, config(**logs))) == ["machine.threads"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 8192))
    assert find(machine.check_room, config(**logs))["machine.files"].do.startswith("ulimit -n 8192")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 8192))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    found = find(machine.check_room, config(**logs))
    assert found.keys() == {"machine.disk", "machine.shared"}
    assert "64 MiB of shared memory" in found["machine.shared"].text and "147 MiB" in found["machine.shared"].text
    assert find(machine.check_room, config(workers=0, **logs)).keys() == {"machine.disk"}
    (tmp_path / "file").write_text("")
    assert "machine.logs" in find(machine.check_room, config(logs=str(tmp_path / "file")))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinities")
def test_a_containers_quota_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr(machine, "QUOTA", tmp_path / "cpu.max")
    assert machine.usable_cores() == 64
    for text, cores in (("400000 100000\n", 4), ("max 100000\n", 64), ("20000 100000\n", 1)):
        (tmp_path / "cpu.max").write_text(text)
        assert machine.usable_cores() == cores
