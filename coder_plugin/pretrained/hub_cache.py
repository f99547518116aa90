"""Download a model's repository from the Hugging Face Hub. ``coder_plugin.integrations.hub`` writes such repositories."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from coder_plugin.backbones.transformers_files import WEIGHTS as TRANSFORMERS_WEIGHTS
from coder_plugin.backbones.transformers_files import has_configuration
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.export import OLDER, export_files
from coder_plugin.pretrained.export_manifest import read_manifest

HUB = "hf-hub:"
#: In an export of interpolated weights (WiSE-FT): ``alpha``, and the two models' names, ``tuned`` and ``base``.
WISE_FT = "wise_ft.json"
#: Files that opening needs. They are downloaded from a repository, and further files that its manifest lists.
_FILES = ["*.json", "*.txt", "*.model", "coder*.safetensors", "concepts.safetensors", "open_clip_model.safetensors"]


def is_on_hub(spec: str | Path | None) -> bool:
    """Whether ``spec`` names a repository: ``hf-hub:OWNER/NAME``."""
    return str(spec).startswith(HUB)


def fetch(
    spec: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None, token: str | bool | None = None
) -> Path:
    """The folder of a model: ``spec`` itself, or the cached copy of ``hf-hub:OWNER/NAME[@REVISION]``.

    Only the files that opening needs are downloaded, and only those that are not in the cache yet.

    Args:
        spec: a folder, or a repository.
        revision: branch, tag or commit; None: the one in ``spec``, or the repository's default branch.
        cache_dir: None: the hub's own.
        token: None: the one that ``hf auth login`` or ``HF_TOKEN`` has set.

    Raises:
        CoderError: no such repository, or one that this token may not read; no connection and no copy; no model in it.
    """
    if not is_on_hub(spec):
        return Path(spec)
    from huggingface_hub import snapshot_download

    name, _, tag = str(spec).removeprefix(HUB).partition("@")
    options: dict[str, Any] = {"revision": revision or tag or None, "cache_dir": cache_dir, "token": token}
    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, **options))
        if export_files(folder)[0] is None:
            of_transformers = has_configuration(folder) and not (folder / "open_clip_config.json").exists()
            further = [TRANSFORMERS_WEIGHTS] if of_transformers else [*OLDER]
            folder = Path(snapshot_download(name, allow_patterns=[*_FILES, *further], **options))
        listed = (read_manifest(folder) or {"files": {}})["files"]
        if further := [glob.escape(file) for file in listed if not (folder / file).is_file()]:
            folder = Path(snapshot_download(name, allow_patterns=[*_FILES, *further], **options))
    except CoderError:
        raise
    except Exception as error:  # the hub's errors, its HTTP client's, and the disk's
        raise hub_error(name, error) from error
    if export_files(folder)[0] is None:
        raise CoderError(f"{name}: the repository holds no model of coder-plugin or open_clip, and no CLIPModel or SiglipModel")
    return folder


def hub_error(name: str, error: Exception) -> CoderError:
    """An error of the hub's client as one line that says what to do."""
    from huggingface_hub import utils

    message = " ".join(str(error).split())[:300]
    if isinstance(error, utils.HFValidationError):
        why = "not the name of a repository: write OWNER/NAME"
    elif isinstance(error, utils.RevisionNotFoundError):
        why = "the repository has no such revision: name a branch, a tag or a commit of it"
    elif isinstance(error, utils.GatedRepoError):
        why = "the repository is gated: ask for access on its page, then log in with hf auth login, or set HF_TOKEN"
    elif isinstance(error, utils.RepositoryNotFoundError):
        why = "no such repository, or a private one: check the name, log in with hf auth login, or set HF_TOKEN"
    elif isinstance(error, (utils.LocalEntryNotFoundError, utils.OfflineModeIsEnabled, ConnectionError)):
        advice = "name a folder instead, a copy made where there is a network by hf download OWNER/NAME --local-dir FOLDER"
        why = f"not in the cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set): {advice}"
    elif getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
        why = f"this token may not do that: log in with hf auth login, or set HF_TOKEN ({message})"
    else:
        why = f"{type(error).__name__}: {message}"
    return CoderError(f"{name}: {why}")
