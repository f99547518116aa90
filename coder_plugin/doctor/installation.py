"""Check the installed packages: versions, conflicts, optional extras, and plugins."""

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
#: The purpose of each extra.
EXTRAS = {
    "concepts": "coder-plugin concepts, and classes of words in SelfAlign (spaCy)",
    "datasets": "data of Hugging Face's datasets",
    "gpu": "FAISS on GPUs",
    "lora": "--lora-rank",
    "open-clip": "open_clip's own trainer with our losses",
    "regions": "region features in HDF5 and LMDB files",
    "report": "figures, and --report-to tensorboard",
}


def check_packages() -> Iterator[Finding]:
    """Python and the required packages: installed, in a version that is allowed, and importable."""
    try:
        requirements = [Requirement(text) for text in metadata.requires(OURS) or []]
    except metadata.PackageNotFoundError:
        yield problem("installation.ours", f"{OURS} is imported, but not installed", "run pip install -e . in its folder")
        return
    required = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    yield ok(
        "installation.python",
        f"Python {platform.python_version()}, {OURS} {metadata.version(OURS)}, {platform.platform()}",
    )
    valid = []
    for each in required:
        finding = _requirement_problem(each)
        if finding is None:
            valid.append(f"{each.name} {installed(each.name)}")
        else:
            yield finding
    if valid:
        yield ok("installation.packages", ", ".join(valid))
    yield from _conflicts([each.name for each in required])
    yield from _extras(requirements)


def _requirement_problem(required: Requirement) -> Finding | None:
    name, version = f"installation.packages.{required.name}", installed(required.name)
    command = f'pip install "{required.name}{required.specifier}"'
    if version is None:
        return problem(name, f"{required.name} is not installed", command)
    if not required.specifier.contains(version, prereleases=True):
        return problem(name, f"{required.name} {version} is installed, {required.specifier} is needed", command)
    try:
        importlib.import_module(module_name(required.name))
    except Exception as error:  # incompatible libraries may raise any exception
        text = f"{required.name} {version} cannot be imported: {type(error).__name__}: {one_line(error)}"
        return problem(name, text, f"{command} --force-reinstall, together with the libraries that it was built for")
    return None


def installed(name: str) -> str | None:
    """The version of a distribution, or None. For "faiss-cpu" any distribution of FAISS counts, such as one for GPUs."""
    for each in _faiss_distributions() if name == "faiss-cpu" else [name]:
        try:
            return metadata.version(each)
        except metadata.PackageNotFoundError:
            continue
    return None


def _faiss_distributions() -> list[str]:
    """The installed distributions of FAISS."""
    names = {canonical(each.metadata["Name"] or "") for each in metadata.distributions()}
    return sorted(name for name in names if name == "faiss" or name.startswith(("faiss-cpu", "faiss-gpu")))


def canonical(name: str) -> str:
    """A distribution's name in lower case with hyphens."""
    return name.replace("_", "-").replace(".", "-").lower()


def module_name(name: str) -> str:
    """The module that a distribution is imported as."""
    return MODULES.get(canonical(name), canonical(name).replace("-", "_"))


def _conflicts(names: list[str]) -> Iterator[Finding]:
    """Requirements between the packages that are not met, such as torchvision's of the torch that it was built for."""
    for name in names:
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for required in map(Requirement, texts):
            if required.marker is not None and not required.marker.evaluate({"extra": ""}):
                continue
            version = installed(required.name)
            if version is not None and not required.specifier.contains(version, prereleases=True):
                needed = f"{name} {installed(name)} needs {required.name}{required.specifier}"
                yield warning(
                    f"installation.conflict.{name}",
                    f"{needed}, but {required.name} {version} is installed",
                    f"pip install --upgrade {name} {required.name}, in one command, so that pip finds compatible versions",
                )


def _extras(requirements: list[Requirement]) -> Iterator[Finding]:
    extras = [each for each in metadata.metadata(OURS).get_all("Provides-Extra") or [] if each != "test"]
    complete, incomplete = [], []
    for extra in sorted(extras):
        missing = [
            each.name
            for each in requirements
            if each.marker is not None
            and not each.marker.evaluate({"extra": ""})
            and each.marker.evaluate({"extra": extra})
            and installed(each.name) is None
        ]
        purpose = f": {EXTRAS[extra]}" if extra in EXTRAS else ""
        if missing:
            incomplete.append(f"{extra} ({', '.join(missing)}){purpose}")
        else:
            complete.append(extra)
    if complete:
        yield ok("installation.extras", f"installed extras: {', '.join(complete)}")
    for each in incomplete:
        extra = each.partition(" ")[0]
        do = f'if you need it: pip install "{OURS}[{extra}]"'
        yield note("installation.extras.absent", f"extra not installed: {each}", do)


def check_libraries() -> Iterator[Finding]:
    """Run the libraries: torchvision's operators, FAISS, open_clip's trainer, plugins."""
    faiss = "faiss-gpu" if "faiss-gpu" in _faiss_distributions() else "faiss-cpu"
    for name, distribution, check in (("torchvision", "torchvision", _torchvision), ("faiss", faiss, _faiss)):
        try:
            yield from check()
        except Exception as error:
            text = f"{name} can be imported, but does not work: {type(error).__name__}: {one_line(error)}"
            yield problem(f"installation.{name}", text, f"pip install --force-reinstall --no-deps {distribution}")
    yield from _trainer()
    yield from _plugins()


def _torchvision() -> Iterator[Finding]:
    import torch
    from torchvision.ops import nms

    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.9]])
    if nms(boxes, torch.tensor([0.9, 0.8]), 0.5).tolist() != [0]:
        raise RuntimeError("torchvision.ops.nms keeps the wrong box")
    yield ok("installation.torchvision", "torchvision's operators run")


def _faiss() -> Iterator[Finding]:
    import numpy as np

    from coder_plugin.search.vectors import import_faiss

    faiss = import_faiss()
    vectors = np.eye(16, dtype=np.float32)
    index = faiss.IndexFlatIP(16)
    index.add(vectors)
    _, nearest = index.search(vectors, 1)
    if nearest[:, 0].tolist() != list(range(16)):
        raise RuntimeError("a search does not find the vectors that were added")
    gpus = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
    yield ok("installation.faiss", f"FAISS {faiss.__version__} works; it can use {gpus} GPU{'s' * (gpus != 1)}")
    distributions = _faiss_distributions()
    if len(distributions) > 1 and not hasattr(faiss, "StandardGpuResources"):
        yield warning(
            "installation.faiss.cpu",
            f"{' and '.join(distributions)} are installed in the same folder, and the one for CPUs has overwritten the other",
            "pip install --force-reinstall --no-deps faiss-gpu",
        )


def _trainer() -> Iterator[Finding]:
    from coder_plugin.integrations.open_clip.command import find_adapter

    try:
        adapter = type(find_adapter()).__name__
    except CoderError as error:
        do = "if you train in open_clip's own trainer: fix what the message names"
        yield note("installation.open_clip_trainer", one_line(error), do)
    else:
        yield ok("installation.open_clip_trainer", f"open_clip's own trainer is supported ({adapter})")


def _plugins() -> Iterator[Finding]:
    from coder_plugin.registry import list_plugins

    plugins = list_plugins(check=True)
    broken = [each for each in plugins if each.error]
    for each in broken:
        text = f"{each.group} {each.name!r} from {each.distribution} {each.version}: {each.error}"
        level = problem if each.distribution == OURS else warning
        yield level("installation.plugin", text, f"fix, upgrade or uninstall {each.distribution}")
    others = sorted({each.distribution for each in plugins} - {OURS})
    sources = f", also from {', '.join(others)}" if others else ""
    yield ok("installation.plugins", f"{len(plugins) - len(broken)} losses, heads, readers and other plugins load{sources}")
