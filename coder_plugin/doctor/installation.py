"""The installed packages and what they require of each other, plugins, and the GPUs that torch can use."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from coder_plugin.doctor.findings import Finding, note, ok, one_line, problem, warning

OURS = "coder-plugin"


def check_packages() -> Iterator[Finding]:
    """Required packages that are missing or of another version, ours and those of the packages that we require."""
    try:
        direct = _requirements(OURS)
    except metadata.PackageNotFoundError:
        yield problem("installation.ours", f"{OURS} is imported, but not installed", "run pip install -e . in its folder")
        return
    yield ok("installation.python", f"Python {platform.python_version()}, {platform.platform()}")
    names = [OURS, *(each.name for each in direct if installed(each.name) is not None)]
    yield ok("installation.packages", ", ".join(f"{name} {installed(name)}" for name in names))
    for name in names:
        for required in direct if name == OURS else _requirements(name):
            version = installed(required.name)
            if version is None or not required.specifier.contains(version, prereleases=True):
                state = "is not installed" if version is None else f"{version} is installed"
                level = problem if name == OURS else warning
                yield level(
                    f"installation.packages.{required.name}",
                    f"{name} needs {required.name}{required.specifier}, but {required.name} {state}",
                    f'pip install "{name}" "{required.name}{required.specifier}", in one command, so that the versions fit',
                )


def _requirements(name: str) -> list[Requirement]:
    """What a distribution requires here, without extras."""
    if name == "faiss-cpu" and installed(name) is not None:
        return []  # a build for GPUs may stand in for it
    required = map(Requirement, metadata.requires(name) or [])
    return [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]


def installed(name: str) -> str | None:
    """The version of a distribution, or None. For "faiss-cpu" a distribution of FAISS for GPUs counts too."""
    for each in ("faiss-cpu", "faiss-gpu", "faiss") if name == "faiss-cpu" else (name,):
        try:
            return metadata.version(each)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_plugins() -> Iterator[Finding]:
    """Plugins that cannot be loaded."""
    from coder_plugin.registry import list_plugins

    plugins = list_plugins(check=True)
    for each in plugins:
        if each.error:
            text = f"{each.group} {each.name!r} from {each.distribution} {each.version}: {each.error}"
            level = problem if each.distribution == OURS else warning
            yield level("installation.plugin", text, f"fix, upgrade or uninstall {each.distribution}")
    others = sorted({each.distribution for each in plugins} - {OURS})
    sources = f", also from {', '.join(others)}" if others else ""
    yield ok("installation.plugins", f"{sum(not each.error for each in plugins)} plugins load{sources}")


def check_gpus() -> Iterator[Finding]:
    """GPUs that torch can use, and why it cannot use those that there are."""
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            text = f"GPU {number}, {torch.cuda.get_device_name(number)}: {free >> 20:,} of {total >> 20:,} MiB free"
            yield ok("machine.gpu", text)
    elif shutil.which("nvidia-smi") is None:
        yield note("machine.gpu.none", "no GPU: training and encoding run on the CPU", "fine for small models and for search")
    else:
        reason = f"torch {torch.__version__} is built without CUDA"
        if torch.version.cuda is not None:
            try:
                torch.cuda.init()
                reason = "no GPU is visible"
            except Exception as error:  # of any kind, as drivers and libraries do not fit
                reason = one_line(error)
        do = "install a driver and a torch that fit (pytorch.org); unset CUDA_VISIBLE_DEVICES; pass GPUs through to a container"
        yield warning("machine.gpu.unused", f"there is an NVIDIA driver, but torch cannot use a GPU: {reason}", do)
