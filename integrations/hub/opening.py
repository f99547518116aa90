"""Open a shared model, an export or a run by its folder or repository."""

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
    """Open a trained model with its tokenizer and transform, ready to encode images and texts.

    ``encode_images`` and ``encode_texts`` of the result give features whose inner product is the score. They compute in
    float32 whatever precision the model was trained in, so that a run and the model shared from it give equal features.

    Args:
        repo_id_or_folder: the folder of a shared model, an export or a run; if there is no such folder, a repository of the
            Hugging Face Hub, ``OWNER/NAME``, of coder_plugin or open_clip. ``hf-hub:OWNER/NAME`` is always a repository.
        revision: branch, tag or commit of the repository; None: its main branch.
        device: where the model computes; None: the CPU.
        cache_dir: folder for downloaded files; None: the hub's default.
        token: an access token; None: the one set by ``hf auth login`` or ``HF_TOKEN``.

    Returns:
        The model with ``encode_images``, ``encode_texts``, ``encoder``, ``model``, ``tokenizer`` and ``transform``.

    Raises:
        CoderError: no model is there, its files are incomplete or damaged, or the hub cannot be reached and there is no
            downloaded copy.

    Example:
        >>> model = coder_plugin.from_pretrained("group/my-model")  # doctest: +SKIP
        >>> model.encode_texts(["a dog in the snow"]).shape         # doctest: +SKIP
        torch.Size([1, 512])
        >>> from_pretrained("my-model")
        Traceback (most recent call last):
        coder_plugin.errors.CoderError: my-model is neither a folder here nor the name of a repository (OWNER/NAME)
    """
    name = str(repo_id_or_folder)
    folder = Path(name)
    if not is_on_hub(name) and not folder.exists():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise CoderError(f"{name} is neither a folder here nor the name of a repository (OWNER/NAME)")
        name = HUB + name
    if is_on_hub(name):
        folder = fetch(name, revision=revision, cache_dir=cache_dir, token=token)
    elif revision is not None:
        raise CoderError(f"{name} is a folder, which has no revisions: leave out revision={revision!r}")
    options = {"precision": "fp32", **({} if cache_dir is None else {"cache_dir": str(cache_dir)})}
    return open_pretrained(folder, options, name=name, device=device or "cpu")
