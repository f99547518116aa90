"""Whether what is installed fits together, and what optional parts are there."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from coder_plugin.doctor.findings import Finding, note, ok, one_line, problem, warning
from coder_plugin.errors import CoderError

OURS = "coder-plugin"
#: Distributions that do not import under their own name.
MODULES = {
    "faiss-cpu": "faiss",
    "faiss-gpu": "faiss",
    "huggingface-hub": "huggingface_hub",
    "open-clip-torch": "open_clip",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
}
#: What an extra is for.
EXTRAS = {
    "concepts": "coder-plugin concepts, and classes of words in SelfAlign (spaCy)",
    "gpu": "FAISS on GPUs",
    "lora": "--lora-rank",
    "open-clip": "open_clip's own trainer with our losses",
    "regions": "region features in HDF5 and LMDB files",
    "report": "figures, and --report-to tensorboard",
}


def check_packages() -> Iterator[Finding]:
    """Python and what coder-plugin cannot do without: there, of a version that will do, and importable."""
    try:
        wanted = [Requirement(text) for text in metadata.requires(OURS) or []]
    except metadata.PackageNotFoundError:
        yield problem("installation.ours", f"{OURS} is imported, but not installed", "pip install -e . in its folder")
        return
    required = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    yield ok(
        "installation.python",
        f"Python {platform.python_version()}, {OURS} {metadata.version(OURS)}, {platform.platform()}",
    )
    sound = []
    for each in required:
        fault = _fault(each)
        if fault is None:
            sound.append(f"{each.name} {installed(each.name)}")
        else:
            yield fault
    if sound:
        yield ok("installation.packages", ", ".join(sound))
    yield from _conflicts([each.name for each in required])
    yield from _extras(wanted)


def _fault(wanted: Requirement) -> Finding | None:
    name, have = f"installation.packages.{wanted.name}", installed(wanted.name)
    get = f'pip install "{wanted.name}{wanted.specifier}"'
    if have is None:
        return problem(name, f"{wanted.name} is not installed", get)
    if not wanted.specifier.contains(have, prereleases=True):
        return problem(name, f"{wanted.name} {have} is installed, {wanted.specifier} is needed", get)
    try:
        importlib.import_module(module_of(wanted.name))
    except Exception as error:  # a library that does not fit another raises anything
        text = f"{wanted.name} {have} does not import: {type(error).__name__}: {one_line(error)}"
        return problem(name, text, f"{get} --force-reinstall, beside the libraries that it was built for")
    return None


def installed(name: str) -> str | None:
    """The version of a distribution; FAISS for GPUs stands in for that for CPUs."""
    for each in _faiss() if name == "faiss-cpu" else [name]:
        try:
            return metadata.version(each)
        except metadata.PackageNotFoundError:
            continue
    return None


def _faiss() -> list[str]:
    """The distributions that bring FAISS."""
    there = {canonical(each.metadata["Name"] or "") for each in metadata.distributions()}
    return sorted(name for name in there if name == "faiss" or name.startswith(("faiss-cpu", "faiss-gpu")))


def canonical(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def module_of(name: str) -> str:
    return MODULES.get(canonical(name), canonical(name).replace("-", "_"))


def _conflicts(names: list[str]) -> Iterator[Finding]:
    """What the libraries say of each other, such as torchvision of the torch that it was built for."""
    for name in names:
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for wanted in map(Requirement, texts):
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            have = installed(wanted.name)
            if have is not None and not wanted.specifier.contains(have, prereleases=True):
                yield warning(
                    f"installation.conflict.{name}",
                    f"{name} {installed(name)} needs {wanted.name}{wanted.specifier}, and {wanted.name} {have} is installed",
                    f"pip install --upgrade {name} {wanted.name}, in one command, so that pip finds versions that fit",
                )


def _extras(wanted: list[Requirement]) -> Iterator[Finding]:
    extras = [each for each in metadata.metadata(OURS).get_all("Provides-Extra") or [] if each != "test"]
    there, lacking = [], []
    for extra in sorted(extras):
        absent = [
            each.name
            for each in wanted
            if each.marker is not None
            and not each.marker.evaluate({"extra": ""})
            and each.marker.evaluate({"extra": extra})
            and installed(each.name) is None
        ]
        purpose = f": {EXTRAS[extra]}" if extra in EXTRAS else ""
        if absent:
            lacking.append(f"{extra} ({', '.join(absent)}){purpose}")
        else:
            there.append(extra)
    if there:
        yield ok("installation.extras", f"extras that are complete: {', '.join(there)}")
    for each in lacking:
        extra = each.partition(" ")[0]
        do = f'only to use it: pip install "{OURS}[{extra}]"'
        if extra == "gpu":
            do += ", then pip install --force-reinstall --no-deps faiss-gpu: two share a folder, the last stays"
        yield note("installation.extras.absent", f"extra not installed: {each}", do)


def check_libraries() -> Iterator[Finding]:
    """What only running them shows: torchvision's operators, FAISS, open_clip's trainer, plugins."""
    for name, check in (("torchvision", _torchvision), ("faiss", _search)):
        try:
            yield from check()
        except Exception as error:
            text = f"{name} imports, but does not work: {type(error).__name__}: {one_line(error)}"
            yield problem(f"installation.{name}", text, f"pip install --upgrade --force-reinstall {name}")
    yield from _trainer()
    yield from _plugins()


def _torchvision() -> Iterator[Finding]:
    import torch
    from torchvision.ops import nms

    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.9]])
    if nms(boxes, torch.tensor([0.9, 0.8]), 0.5).tolist() != [0]:
        raise RuntimeError("its nms keeps the wrong box")
    yield ok("installation.torchvision", "torchvision's operators run")


def _search() -> Iterator[Finding]:
    import faiss
    import numpy as np

    vectors = np.eye(16, dtype=np.float32)
    index = faiss.IndexFlatIP(16)
    index.add(vectors)
    _, found = index.search(vectors, 1)
    if found[:, 0].tolist() != list(range(16)):
        raise RuntimeError("a search does not find the vectors that were put in")
    gpus = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
    yield ok("installation.faiss", f"FAISS {faiss.__version__} finds what it was given; it sees {gpus or 'no'} GPU")
    if len(both := _faiss()) > 1:
        yield warning(
            "installation.faiss.twice",
            f"{' and '.join(both)} are installed, into one folder: whichever came last has overwritten the other",
            f"pip uninstall {' '.join(both)}, then install the one you want",
        )


def _trainer() -> Iterator[Finding]:
    from coder_plugin.integrations.open_clip.command import find_adapter

    try:
        adapter = type(find_adapter()).__name__
    except CoderError as error:
        do = "only to train inside open_clip's own trainer: put right what it names"
        yield note("installation.open_clip_trainer", one_line(error), do)
    else:
        yield ok("installation.open_clip_trainer", f"open_clip's own trainer is known ({adapter})")


def _plugins() -> Iterator[Finding]:
    from coder_plugin.registry import list_plugins

    plugins = list_plugins(check=True)
    broken = [each for each in plugins if each.error]
    for each in broken:
        text = f"{each.group} {each.name!r} of {each.distribution} {each.version}: {each.error}"
        level = problem if each.distribution == OURS else warning
        yield level("installation.plugin", text, f"mend, upgrade or uninstall {each.distribution}")
    others = sorted({each.distribution for each in plugins} - {OURS})
    of = f", of {', '.join(others)} too" if others else ""
    yield ok("installation.plugins", f"{len(plugins) - len(broken)} losses, heads, readers and other plugins load{of}")
