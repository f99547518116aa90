"""Write a trained model for others: to a folder, or to a repository of the Hugging Face Hub. The files are the same."""

from __future__ import annotations

import glob
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from coder_plugin.backbones import plugin_backbones
from coder_plugin.backbones.base import Backbone
from coder_plugin.errors import CoderError
from coder_plugin.files import sha256_file
from coder_plugin.integrations.hub import sentence_transformers as st
from coder_plugin.integrations.hub.card import card_text
from coder_plugin.integrations.hub.folder import check_replaceable, swap
from coder_plugin.integrations.hub.record import bare, bare_objective, read_wise_ft, run_record, without_paths
from coder_plugin.pretrained.export import HEADS, OLDER, VOCABULARY, WEIGHTS, export_files, export_heads, export_model
from coder_plugin.pretrained.hub_cache import (
    CARD,
    HUB,
    RECORD,
    fetch,
    hub_error,
    is_on_hub,
    read_record,
    record_options,
)
from coder_plugin.pretrained.open import PretrainedModel, export_folder, open_pretrained

#: Files of another model that would be read instead of the new ones or with them.
_STALE = (WEIGHTS, *OLDER, "open_clip_config.json", HEADS, VOCABULARY, plugin_backbones.WEIGHTS, plugin_backbones.CONFIG)
#: What two models that are the same give the same vectors of.
_TEXTS = ["a picture", "two red apples and a green bottle on the table to the left of the window"]


class _Source(NamedTuple):
    place: Path  # the export's folder
    run: Path | None
    record: dict[str, Any] | None  # of a folder that was shared before


def save_pretrained(
    run_or_export: str | Path,
    folder: str | Path,
    *,
    export: str = "best",
    license: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
) -> Path:
    """Write a trained model to a folder that :func:`from_pretrained` opens anywhere; returns it. No network is used.

    Towers, scoring heads, vocabulary, tokenizer, ``coder_run.json`` and a model card. The folder appears when it is whole and
    has been opened and found to be the same model to the bit.

    Args:
        run_or_export: a training run's folder, an export's, or one that was shared: its ``README.md`` is kept if it was edited.
        folder: a new one, or one that was shared and not changed since, which is replaced.
        export: which of a run's, best or last.
        license: the hub's name of the weights' licence, such as cc-by-nc-4.0. base_model: the repository of the model that this
            one began as. datasets: what it was trained on, by the hub's names or others.

    Raises:
        CoderError: nothing to share there, or the folder holds something else.
    """
    if is_on_hub(folder):
        raise CoderError(f"{folder} is a repository: push_to_hub (--repo {str(folder).removeprefix(HUB)}) writes there")
    named, folder = Path(folder), Path(folder).resolve()
    aside = folder.with_name(f".{folder.name or 'model'}.writing-{os.getpid()}")
    try:
        check_replaceable(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        _write(run_or_export, aside, folder.name, export, license=license, base_model=base_model, datasets=datasets)
        swap(aside, folder)
    except OSError as error:
        raise CoderError(f"{named}: nothing was shared: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return named


def push_to_hub(
    run_or_export: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Share a model trained with coder-plugin",
    create_pr: bool = False,
    export: str = "best",
    license: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
) -> str:
    """Write a trained model to a repository of the Hugging Face Hub, made if there is none; returns the commit's address.

    The files are those of :func:`save_pretrained`, in one commit; files of an earlier model are removed in it.

    Args:
        run_or_export, export, license, base_model, datasets: as in :func:`save_pretrained`.
        private: of a new repository; nothing is pushed to a public one. token: None: ``hf auth login``'s or ``HF_TOKEN``.
        revision: a branch, made if there is none. create_pr: open a pull request instead of committing.

    Raises:
        CoderError: nothing to share there, no permission, no connection.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory(prefix="coder-share-") as made:
        folder = Path(made) / "model"
        _write(run_or_export, folder, repo_id, export, license=license, base_model=base_model, datasets=datasets)
        api = HfApi(token=token)
        try:
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if private and not api.repo_info(repo_id).private:
                raise CoderError(f"{repo_id} is public already: make it private on its page first, or leave out private")
            if revision is not None and not create_pr:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            earlier = _earlier(api, repo_id, None if create_pr else revision, Path(made) / "earlier")
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
        except Exception as error:  # the hub's errors, its HTTP client's, and the disk's
            raise hub_error(repo_id, error) from error
    return commit.pr_url or commit.commit_url


def _earlier(api: Any, repo_id: str, revision: str | None, folder: Path) -> list[str]:
    """A repository's files that are an earlier model's: those that its record lists, and weights that would be read."""
    if not api.file_exists(repo_id, RECORD, revision=revision):
        return [*_STALE]
    api.hf_hub_download(repo_id, RECORD, revision=revision, local_dir=folder)
    try:
        record = read_record(folder)
    except CoderError as error:
        logging.warning("%s: other files of the model that was there may stay: %s", repo_id, error)
        record = None
    return [*_STALE, *(record or {"files": {}})["files"]]


def share_command(arguments: Any) -> str:
    """``coder-plugin share``: what was written, and how it is opened."""
    options = {name: getattr(arguments, name) for name in ("export", "license", "base_model", "datasets")}
    if arguments.repo is None:
        if arguments.private:
            raise CoderError("--private is of a repository: leave it out with --to")
        folder = save_pretrained(arguments.run_folder, arguments.to, **options)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return (
            f"{folder}: {size / 1e6:.1f} MB; read {folder / CARD}, the model card, and add to it\n"
            f'open it: coder_plugin.from_pretrained("{folder}"); push it: coder-plugin share {folder} --repo OWNER/NAME'
        )
    address = push_to_hub(arguments.run_folder, arguments.repo, private=arguments.private, **options)
    return f'{address}\nopen it: coder_plugin.from_pretrained("{arguments.repo}")'


def _source(spec: str | Path, export: str) -> _Source:
    folder = fetch(spec)
    if export_files(folder)[0] is not None:
        run = folder.parent.parent  # of RUN/export/best
        of_run = folder.parent.name == "export" and folder.name in ("best", "last") and (run / "config.json").is_file()
        return _Source(folder, run if of_run else None, read_record(folder))
    place = folder / "export" / export
    if export_files(place)[0] is None:
        export_folder(folder, export=export)  # raises, and says what is there
    return _Source(place, folder, None)


def _write(spec: str | Path, aside: Path, name: str, export: str, **stated: Any) -> None:
    """Every file of a shared model into a new folder; ``name`` is what the card calls it."""
    source = _source(spec, export)
    card = _own_card(source)
    if card is not None and any(stated.values()):
        given = " and ".join(option for option, value in stated.items() if value)
        raise CoderError(f"{card} is kept as it is: write {given} there, or share the run anew")
    record = source.record or run_record(source.run, source.place.name if source.run else export)
    if source.record is None and (mixed := read_wise_ft(source.place)):
        record["wise_ft"] = mixed
    stated = {option: value or record.get("stated", {}).get(option) or value for option, value in stated.items()}
    kept = record_options(record)
    trained = open_pretrained(source.place, kept, device="cpu")
    if record["objective"] is None and (source.place / HEADS).is_file():  # an export knows the objective of its heads
        objective = trained.model.coder.objective
        record = {**record, "objective": str(objective), "terms": bare_objective(objective.to_dict())}
    aside.mkdir(parents=True)
    export_model(trained.model, aside, tokenizer=trained.tokenizer, options=trained.inference_options())
    export_heads(trained.model, aside)
    _forget_paths(aside)
    facts = _facts(trained, kept)
    if facts["pictures"]:
        st.write_files(aside)
    written = {
        "format": 1,
        **{key: record[key] for key in ("objective", "terms", "options", "run", "results")},
        **({"wise_ft": record["wise_ft"]} if "wise_ft" in record else {}),
        "model": facts,
        "stated": stated,
        "written by": {"coder-plugin": version("coder-plugin")},
    }
    sizes = {path.name: path.stat().st_size for path in aside.glob("*.safetensors")}
    if card is not None:
        shutil.copyfile(card, aside / CARD)
    else:
        try:
            text = card_text(name, written, sizes, on_hub="/" in name, **stated)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if source.record is None:
                raise
            raise CoderError(f"{source.place / RECORD} does not say what a card is made of: {error!r}") from error
        (aside / CARD).write_text(text, encoding="utf-8")
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    written["files"] = {
        path.relative_to(aside).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in files
    }
    (aside / RECORD).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    for path in files:
        shutil.copymode(aside / RECORD, path)  # safetensors makes its files private, against the user's umask
    _check_same(trained, aside)


def _own_card(source: _Source) -> Path | None:
    """A card that somebody wrote or changed, which is kept. One of ours is made anew, for the name may be another."""
    card = source.place / CARD
    if not card.is_file():
        return None
    made = ((source.record or {}).get("files", {}).get(CARD) or {}).get("sha256")
    return None if sha256_file(card) == made else card


def _facts(trained: PretrainedModel, kept: Mapping[str, Any]) -> dict[str, Any]:
    """What a card says of a model."""
    model = trained.model
    known = [getattr(head, "vocabulary", None) for head in model.coder.heads.values()]
    vocabulary = next((each for each in known if each is not None), None)
    tower = type(model).__name__.removeprefix("Coder")
    return {
        "class": tower,
        "name": model.name if isinstance(model, Backbone) else tower,
        "pictures": not isinstance(model, Backbone),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dimensions": trained.encode_texts(["a picture"]).shape[-1],
        "views": model.coder.views,
        "heads": list(model.coder.heads),
        "aggregator": "gpo" if len(model.coder.aggregators) else "tower",
        "concepts": None if vocabulary is None else len(vocabulary),
        "re-ranks": trained.encoder().reranking is not None,
        "text tower": _text_tower(model),
        "max_regions": kept.get("max_regions", trained.config.max_regions) if isinstance(model, Backbone) else None,
    }


def _text_tower(model: Any) -> str | None:
    """The Hugging Face tower that open_clip asks its hub for, or the folder that stands for it."""
    text = (getattr(model, "coder_config", None) or {}).get("text_cfg", {}).get("hf_model_name")
    return None if text is None else _portable(text)


def _portable(name: str) -> str:
    """A tower's name on the hub, or, where it was a path, the folder beside: open_clip reads it from the working directory."""
    from coder_plugin.backbones.clip import TEXT_FOLDER

    local = name.startswith((".", "~")) or name.count("/") > 1 or Path(name).is_absolute() or Path(name).exists()
    return TEXT_FOLDER if local else name


def _forget_paths(folder: Path) -> None:
    """Take out of the files' texts where things lay on this machine."""
    for name in ("open_clip_config.json", plugin_backbones.CONFIG, VOCABULARY.replace(".safetensors", ".json")):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            text = found.get("model_cfg", {}).get("text_cfg", {})
            for key in ("hf_model_name", "hf_tokenizer_name"):
                if text.get(key):
                    text[key] = _portable(text[key])
            if "settings" in found:
                found["settings"] = {key: bare(v) if isinstance(v, str) else v for key, v in found["settings"].items()}
            _write_json(folder / name, without_paths(found))
    for path in (*folder.rglob("tokenizer_config.json"), *folder.rglob("text/config.json")):
        _write_json(path, without_paths(json.loads(path.read_text(encoding="utf-8"))))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_same(trained: PretrainedModel, folder: Path) -> None:
    again = open_pretrained(folder, device=trained.device)
    before, after = _vectors(trained), _vectors(again)
    if not all(each.isfinite().all() for each in before):
        raise CoderError(f"{trained.name} gives vectors with NaN or infinity: nothing was shared; share another export")
    equal = all(map(torch.equal, before, after))
    if not equal or again.fingerprint() != trained.fingerprint():
        raise CoderError(f"{folder} opens as another model than {trained.name}: nothing was shared; please report this")


def _vectors(trained: PretrainedModel) -> list[Tensor]:
    """Of two texts and of a made-up picture or its regions: settings that are in no weights show in these."""
    if isinstance(trained.model, Backbone):
        with torch.no_grad():
            image = trained.model.embed_image(trained.model.example_image(1))
    else:
        pixels = torch.randint(0, 256, (97 * 61 * 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        image = trained.encode_images([Image.frombytes("RGB", (97, 61), pixels.numpy().tobytes())])
    return [image, trained.encode_texts(_TEXTS)]
