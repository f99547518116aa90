"""Models that somebody shared: a repository of the Hugging Face Hub as a folder here, and whether such a folder is whole.

A shared folder is an export's (training/export.py) with two more files: ``README.md``, the model card, and ``coder_run.json``,
what was run and which files there are. ``coder_plugin.integrations.hub`` writes it.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.files import sha256_file
from coder_plugin.pretrained.export import OLDER, exported

HUB = "hf-hub:"
#: What was run, and the files' sizes and checksums.
RECORD = "coder_run.json"
CARD = "README.md"
#: In an export whose weights lie between two models' (WiSE-FT): ``alpha``, and the names ``tuned`` and ``base``.
WISE_FT = "wise_ft.json"
#: The run's options that say how a model is read, computed and scored, and that its weights and configuration do not hold.
_KEPT = {"max_regions": int, "rerank": str, "channels_last": bool}
#: What a model is opened with; of a repository these are downloaded, and what its record lists.
_FILES = ["*.json", "*.txt", "*.model", "coder*.safetensors", "concepts.safetensors", "open_clip_model.safetensors"]
_OLDER = [*OLDER]  # in most repositories the same weights a second time


def is_on_hub(spec: str | Path | None) -> bool:
    return str(spec).startswith(HUB)


def fetch(
    spec: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None, token: str | bool | None = None
) -> Path:
    """The folder that ``spec`` names: itself, or of ``hf-hub:OWNER/NAME[@REVISION]`` the copy in the hub's cache.

    Only what a model is opened with is downloaded, and only what is not there yet.

    Raises:
        CoderError: no such repository, none that this token may read, no connection and no copy, or no model in it.
    """
    if not is_on_hub(spec):
        return Path(spec)
    from huggingface_hub import snapshot_download

    name, _, tag = str(spec).removeprefix(HUB).partition("@")
    options: dict[str, Any] = {"revision": revision or tag or None, "cache_dir": cache_dir, "token": token}
    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, **options))
        if exported(folder)[0] is None:
            folder = Path(snapshot_download(name, allow_patterns=[*_FILES, *_OLDER], **options))
        if further := [glob.escape(file) for file in _listed(folder) if not (folder / file).is_file()]:
            folder = Path(snapshot_download(name, allow_patterns=[*_FILES, *further], **options))
    except CoderError:
        raise
    except Exception as error:  # the hub's errors, its HTTP client's, and the disk's
        raise hub_error(name, error) from error
    if exported(folder)[0] is None:
        raise CoderError(f"{name}: the repository holds no model of coder-plugin's or open_clip's")
    return folder


def hub_error(name: str, error: Exception) -> CoderError:
    """What a person can do about an error of the hub's client."""
    from huggingface_hub import utils

    said = " ".join(str(error).split())[:300]
    if isinstance(error, utils.HFValidationError):
        why = "no name of a repository: write OWNER/NAME"
    elif isinstance(error, utils.RevisionNotFoundError):
        why = "the repository has no such revision: name a branch, a tag or a commit of it"
    elif isinstance(error, utils.GatedRepoError):
        why = "the repository is gated: ask for access on its page, then log in with hf auth login, or set HF_TOKEN"
    elif isinstance(error, utils.RepositoryNotFoundError):
        why = "no such repository, or a private one: check the name, log in with hf auth login, or set HF_TOKEN"
    elif isinstance(error, (utils.LocalEntryNotFoundError, utils.OfflineModeIsEnabled, ConnectionError)):
        why = f"not in the cache, and the hub cannot be reached (is HF_HUB_OFFLINE set?): name a folder instead ({said})"
    elif getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
        why = f"this token may not do that: log in with hf auth login, or set HF_TOKEN ({said})"
    else:
        why = f"{type(error).__name__}: {said}"
    return CoderError(f"{name}: {why}")


def read_record(folder: Path) -> dict[str, Any] | None:
    """What ``coder_run.json`` says; None where a folder has none.

    Raises:
        CoderError: it cannot be read, or is none: whoever shared the folder may have written anything.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CoderError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(record, dict):
        raise CoderError(f"{path} cannot be read: it is no object")
    record = {"objective": None, "terms": {}, "run": {}, "results": {}, "stated": {}, **record}
    for key in ("files", "options", "terms", "run", "results", "stated"):
        if not isinstance(record.get(key), dict):
            raise CoderError(f"{path} cannot be read: {key} is no object")
    for name, of in record["files"].items():
        if not (isinstance(of, dict) and isinstance(of.get("bytes"), int) and isinstance(of.get("sha256"), str)):
            raise CoderError(f"{path} cannot be read: {name} has no size and checksum")
        if not _is_inside(name):
            raise CoderError(f"{path} lists {name!r}, which is no file of its folder")
    return record


def _is_inside(name: str) -> bool:
    plain = PurePosixPath(name)
    elsewhere = plain.is_absolute() or ".." in plain.parts or "\\" in name or ":" in name
    return plain.as_posix() == name != "." and not elsewhere


def _listed(folder: Path) -> list[str]:
    """The files that a model is opened with, as its record has them; none where there is no record."""
    record = read_record(folder)
    return [] if record is None else [name for name in record["files"] if name != CARD]


def kept_options(folder: Path) -> dict[str, Any]:
    """The options that came with a shared folder, all its files but the card being there and as they were.

    Raises:
        CoderError: a file is missing, or is not what was shared: the score may be another.
    """
    record = read_record(folder)
    if record is None:
        return {}
    for name in _listed(folder):
        file, was = folder / name, record["files"][name]
        if not file.is_file():
            raise CoderError(f"{folder} is not whole: {name} is missing; copy or download it again")
        if file.stat().st_size != was["bytes"] or sha256_file(file) != was["sha256"]:
            raise CoderError(f"{file} is damaged, or not the file that was shared: copy or download it again")
    return kept_of(record)


def kept_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The options that go with a model, of all that a record holds.

    Raises:
        CoderError: a value of another kind.
    """
    kept = {name: record["options"][name] for name in _KEPT if record["options"].get(name) is not None}
    for name, value in kept.items():
        if not isinstance(value, _KEPT[name]):
            raise CoderError(f"{RECORD}: {name} must be {_KEPT[name].__name__}, got {value!r}")
    return kept
