"""The installed packages and what they require of each other, plugins, and the GPUs that torch can use."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coder_plugin.doctor.findings import Finding, note, ok, one_line, problem, warning

OURS = "coder-plugin"


def check_packages() -> Iterator[Finding]:
    """Versions, and what ``pip check`` finds missing or conflicting: of our requirements, of these packages', of others."""
    versions = {canonicalize_name(each.name): each.version for each in metadata.distributions()}
    if OURS not in versions:
        yield problem("installation.ours", f"{OURS} is imported, but not installed", "run pip install -e . in its folder")
        return
    required = [re.split(r"[^\w.-]", line)[0] for line in metadata.requires(OURS) or () if "extra ==" not in line]
    yield ok("installation.python", f"Python {platform.python_version()}, {platform.platform()}")
    names = [name for name in map(canonicalize_name, (OURS, *required)) if name in versions]
    yield ok("installation.packages", ", ".join(f"{name} {versions[name]}" for name in names))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"], capture_output=True, text=True, check=False
    )
    if done.returncode and not done.stdout.strip():
        text = f"only {OURS}'s own requirements were checked: {one_line(done.stderr)}"
        yield note("installation.pip", text, "python -m ensurepip, or uv pip check")
        for line in metadata.requires(OURS) or ():
            needed = Requirement(line)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            found = versions.get(canonicalize_name(needed.name))
            if found is None or not needed.specifier.contains(found, prereleases=True):
                text = f"{OURS} requires {needed}, which is " + (f"{found} here" if found else "not installed")
                yield problem(f"installation.packages.{needed.name}", text, f"install {needed}")
    for line in done.stdout.splitlines() if done.returncode else ():
        name = line.split()[0].lower()
        if name == OURS and "faiss-cpu" in line and {"faiss", "faiss-gpu"} & versions.keys():
            continue  # a build for GPUs may stand in for it
        level = problem if name == OURS else warning if name in names else note
        do = "pip install the package and what it requires in one command, so that the versions fit"
        yield level(f"installation.packages.{name}", one_line(line), do)


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
