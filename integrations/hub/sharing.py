"""Write a trained model for others: to a folder, or to a repository of the Hugging Face Hub. The files are the same."""

from __future__ import annotations

import contextlib
import glob
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from coder_plugin.backbones import plugin_backbones
from coder_plugin.config import ModelConfig
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_folder, sha256_file
from coder_plugin.integrations.hub.contents import write_model
from coder_plugin.integrations.hub.record import read_record
from coder_plugin.pretrained.build import make_tokenizer
from coder_plugin.pretrained.export import HEADS, OLDER, VOCABULARY, WEIGHTS, export_model
from coder_plugin.pretrained.export_manifest import CARD, MANIFEST, read_manifest
from coder_plugin.pretrained.hub_cache import HUB, hub_error, is_on_hub

#: Files of an earlier model in a repository that would be read instead of the new files, or together with them.
_STALE = (WEIGHTS, *OLDER, "open_clip_config.json", HEADS, VOCABULARY, plugin_backbones.WEIGHTS, plugin_backbones.CONFIG)


def save_pretrained(
    model: Any,
    folder: str | Path,
    *,
    export: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
) -> Path:
    """Write a trained model to a folder that :func:`from_pretrained` opens on any machine, without network access.

    The folder holds the towers, the scoring heads, the vocabulary, the tokenizer, ``coder_run.json`` and a model card. It
    appears only when it is complete, and has been opened and compared with the model: weights and features are equal to the
    bit.

    Args:
        model: a model of :func:`coder_plugin.create_model`, trained in any loop; or a training run's folder, an export's
            folder, or a shared model's. The ``README.md`` of a shared model is kept if it was edited.
        folder: a new folder, or one that this function wrote. The earlier model there is replaced without asking, unless files
            beside the weights were added or changed.
        export: which export of a run, "best" or "last"; None: best, or last if there is no best.
        license: for the card: the licence of the weights by the hub's name for it, such as "cc-by-nc-4.0".
        base_model: for the card: the repository of the model that training started from.
        datasets: for the card: names of the training data, by the hub's names where they have one.

    Returns:
        The folder.

    Raises:
        CoderError: ``model`` holds no model, ``folder`` is one, holds other files or cannot be written, or the model gives
            features with NaN or infinity.

    Example:
        >>> import tempfile, coder_plugin
        >>> model = coder_plugin.create_model("coder-tiny", loss="dcl")
        >>> folder = tempfile.mkdtemp() + "/my-model"
        >>> _ = coder_plugin.save_pretrained(model, folder, license="mit")
        >>> coder_plugin.from_pretrained(folder).encode_texts(["a red circle"]).shape
        torch.Size([1, 128])
        >>> save_pretrained("logs/my-run", "hf-hub:group/my-model")
        Traceback (most recent call last):
        coder_plugin.errors.CoderError: hf-hub:group/my-model is a repository: push_to_hub (--repo group/my-model) writes there
    """
    if isinstance(folder, nn.Module):
        raise CoderError("the order is save_pretrained(model, folder): the model comes first")
    if is_on_hub(folder):
        raise CoderError(f"{folder} is a repository: push_to_hub (--repo {str(folder).removeprefix(HUB)}) writes there")
    path = Path(folder).resolve()
    if path in (Path.cwd(), *Path.cwd().parents):
        raise CoderError(f"{path} is the working directory, or above it, and would be replaced: name a folder in it")
    card_fields = {"license": license, "base_model": base_model, "datasets": datasets}
    try:
        with atomic_folder(path) as temporary:
            _check_replaceable(path)
            with exported(model) as source:
                write_model(source, temporary, path.name, export, **card_fields)
    except OSError as error:
        raise CoderError(f"{folder}: nothing was shared: {error}") from error
    return Path(folder)


@contextlib.contextmanager
def exported(model: Any) -> Iterator[str | Path]:
    """The folder of a model: of a model object, a temporary export; a path as it is."""
    if not isinstance(model, nn.Module):
        yield model
        return
    name: Any = getattr(model, "coder_name", None)
    if not isinstance(name, str):
        raise CoderError(f"the {type(model).__name__} is no model of coder_plugin.create_model: pass that, without a wrapper")
    tokenizer = make_tokenizer(ModelConfig(name=name), model)
    with tempfile.TemporaryDirectory() as temporary:
        export_model(model, temporary, tokenizer=tokenizer)
        yield temporary


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    private: bool = False,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Share a model trained with coder-plugin",
    create_pr: bool = False,
    export: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
) -> str:
    """Write a trained model to a repository of the Hugging Face Hub, which is created if it does not exist.

    The files are those of :func:`save_pretrained`, in one commit, which also removes the files of an earlier model.

    Args:
        model: a model, or a folder, as of :func:`save_pretrained`.
        repo_id: the repository, ``OWNER/NAME``.
        private: make a new repository private; a repository that is public already is refused.
        token: an access token; None: the one set by ``hf auth login`` or ``HF_TOKEN``.
        revision: the branch, created if it does not exist; None: the main branch.
        commit_message: first line of the commit's message.
        create_pr: open a pull request instead of committing.
        export: which export of a run, "best" or "last"; None: best, or last if there is no best.
        license: for the card: the licence of the weights by the hub's name for it, such as "cc-by-nc-4.0".
        base_model: for the card: the repository of the model that training started from.
        datasets: for the card: names of the training data, by the hub's names where they have one.

    Returns:
        The address of the commit or of the pull request.

    Raises:
        CoderError: ``model`` holds no model, or the hub cannot be reached or refuses the push.

    Example:
        >>> coder_plugin.push_to_hub("logs/my-run", "group/my-model", private=True)  # doctest: +SKIP
        'https://huggingface.co/group/my-model/commit/1f0c…'
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory(prefix="coder-share-") as temporary:
        folder = Path(temporary) / "model"
        with exported(model) as source:
            write_model(source, folder, repo_id, export, license=license, base_model=base_model, datasets=datasets)
        api = HfApi(token=token)
        try:
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if private and not api.repo_info(repo_id).private:
                raise CoderError(f"{repo_id} is public already: make it private on its page first, or leave out private")
            if revision is not None and not create_pr:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            earlier = _earlier_files(api, repo_id, None if create_pr else revision, Path(temporary) / "earlier")
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
                delete_patterns=[glob.escape(name) for name in earlier],
            )
        except CoderError:
            raise
        except Exception as error:  # errors of the hub, of its HTTP client, and of the disk
            raise hub_error(repo_id, error) from error
    return commit.pr_url or commit.commit_url


def _earlier_files(api: Any, repo_id: str, revision: str | None, folder: Path) -> list[str]:
    """Files of an earlier model in a repository: those that its manifest lists, and weights that would be read."""
    if not api.file_exists(repo_id, MANIFEST, revision=revision):
        return [*_STALE]
    api.hf_hub_download(repo_id, MANIFEST, revision=revision, local_dir=folder)
    try:
        manifest = read_manifest(folder)
    except CoderError as error:
        logging.warning("%s: other files of the earlier model may stay: %s", repo_id, error)
        manifest = None
    return [*_STALE, *(manifest or {"files": {}})["files"]]


def _check_replaceable(folder: Path) -> None:
    """Raise CoderError if a folder holds anything that sharing did not write, or that was changed since."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise CoderError(f"{folder} is a file: name a folder")
    record, manifest = read_record(folder), read_manifest(folder)
    if record is None or manifest is None:
        raise CoderError(f"{folder} exists and holds something else: name a new folder, or that of a shared model")
    written = {name: entry["sha256"] for name, entry in manifest["files"].items()} | {CARD: record["card"].get("sha256")}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name == MANIFEST:
            continue
        if name not in written:
            raise CoderError(f"{folder} holds {name}, which sharing did not write: move it elsewhere, or name a new folder")
        if path.suffix != ".safetensors" and sha256_file(path) != written[name]:
            raise CoderError(f"{path} was changed since it was shared: move it elsewhere, or name a new folder")


def share_command(arguments: Any) -> str:
    """Run ``coder-plugin share`` and return its message: what was written, and how to open it."""
    options = {name: getattr(arguments, name) for name in ("export", "license", "base_model", "datasets")}
    if arguments.repo is None:
        if arguments.private:
            raise CoderError("--private applies to a repository (--repo): leave it out with --to")
        folder = save_pretrained(arguments.run_folder, arguments.to, **options)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return (
            f"{folder}: {size / 1e6:.1f} MB; read {folder / CARD}, the model card, and add to it\n"
            f'open it: coder_plugin.from_pretrained("{folder}"); push it: coder-plugin share {folder} --repo OWNER/NAME'
        )
    address = push_to_hub(arguments.run_folder, arguments.repo, private=arguments.private, **options)
    return f'{address}\nopen it: coder_plugin.from_pretrained("{arguments.repo}")'
