"""A shared model, opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.pretrained.hub_cache import HUB, fetch, is_on_hub
from coder_plugin.pretrained.open import PretrainedModel, open_pretrained


def from_pretrained(
    repo_id_or_folder: str | Path,
    *,
    revision: str | None = None,
    device: Any = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
) -> PretrainedModel:
    """A trained model with what it reads: ``encode_images`` and ``encode_texts`` give vectors whose product is the score, in
    float32 whatever a run was trained in, so that a run and what was shared of it give the same.

    Args:
        repo_id_or_folder: a folder that was shared, an export's or a run's; where there is none of that name, a repository of
            the Hugging Face Hub, ``OWNER/NAME`` (or ``hf-hub:OWNER/NAME``, whatever folders there are), ours or open_clip's.
        revision: branch, tag or commit of the repository. device: None: the CPU.
        cache_dir: None: the hub's own. token: None: the one that ``hf auth login`` or ``HF_TOKEN`` has set.

    Raises:
        CoderError: nothing there that opens, or no connection and no copy.
    """
    name = str(repo_id_or_folder)
    folder = Path(name)
    if not is_on_hub(name) and not folder.exists():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise CoderError(f"{name} is no folder here, and no repository's name either, which is OWNER/NAME")
        name = HUB + name
    if is_on_hub(name):
        folder = fetch(name, revision=revision, cache_dir=cache_dir, token=token)
    elif revision is not None:
        raise CoderError(f"{name} is a folder, which has no revisions: leave out revision={revision!r}")
    given = {"precision": "fp32", **({} if cache_dir is None else {"cache_dir": str(cache_dir)})}
    return open_pretrained(folder, given, name=name, device=device or "cpu")
