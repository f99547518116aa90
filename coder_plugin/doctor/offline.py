"""Nothing is downloaded: hubs are not asked, and what only they have is told from what is wrong."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from coder_plugin.errors import CoderError


def stay_offline() -> None:
    """Before transformers and open_clip are imported, which ask a hub for files that are not in its cache."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    if (hub := sys.modules.get("huggingface_hub")) is not None:
        hub.constants.HF_HUB_OFFLINE = True


def folder_of(spec: str, cache_dir: str | None = None) -> Path:
    """``spec`` as a folder; of ``hf-hub:OWNER/NAME`` the copy in the hub's cache.

    Raises:
        CoderError: no copy there, or no whole one.
    """
    from coder_plugin.pretrained.hub_cache import HUB, fetch, is_on_hub

    try:
        return fetch(spec, cache_dir=cache_dir)
    except CoderError as error:
        broken_off = error.__cause__ is None  # a download that was interrupted leaves a copy without a model
        if not is_on_hub(spec) or not (is_absent(error) or broken_off):
            raise
        name = spec.removeprefix(HUB).partition("@")[0]
        raise CoderError(
            f"{spec}: no whole copy in the hub's cache here, and doctor downloads nothing: hf download {name}, or name a folder"
        ) from error


def is_absent(error: BaseException | None) -> bool:
    """Whether an error comes of a file of the Hugging Face Hub that is not in its cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    while error is not None:
        if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
            return True
        error = error.__cause__ or error.__context__
    return False
