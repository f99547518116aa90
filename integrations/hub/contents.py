"""The files of a shared model: weights, configuration, record and model card, checked to open as the same model."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from PIL import Image
from torch import Tensor

from coder_plugin.backbones import plugin_backbones
from coder_plugin.backbones.base import Backbone
from coder_plugin.backbones.transformers_clip import TransformersTowers
from coder_plugin.errors import CoderError
from coder_plugin.files import sha256_file
from coder_plugin.integrations.hub.card import card_text
from coder_plugin.integrations.hub.record import (
    RECORD,
    bare,
    bare_objective,
    read_record,
    read_wise_ft,
    run_record,
    without_paths,
)
from coder_plugin.integrations.sentence_transformers import module as st
from coder_plugin.pretrained.export import HEADS, VOCABULARY, export_files, write_export
from coder_plugin.pretrained.export_manifest import CARD, check_link, seal_again
from coder_plugin.pretrained.hub_cache import fetch
from coder_plugin.pretrained.open import PretrainedModel, export_folder, open_pretrained

#: Captions whose features are compared between the model and its shared files.
_TEXTS = ["a picture", "two red apples and a green bottle on the table to the left of the window"]


class _Source(NamedTuple):
    """The model to share: its export's folder, its run's folder, and the record of a model that was already shared."""

    export: Path
    run: Path | None
    record: dict[str, Any] | None


def write_model(spec: str | Path, folder: Path, name: str, export: str | None, **card_fields: Any) -> None:
    """Write every file of a shared model.

    Args:
        spec: a run's folder, an export's, or a shared model.
        folder: a new or empty folder.
        name: the model's name in the card.
        export: which export of a run, "best" or "last"; None: best, or last if there is no best.
        card_fields: ``license``, ``base_model`` and ``datasets`` for the card.

    Raises:
        CoderError: ``spec`` holds no model, its record cannot be used, or the written files open as a different model.
    """
    source = _source(spec, export)
    edited_card = _edited_card(source)
    if edited_card is not None and any(card_fields.values()):
        names = " and ".join(option for option, value in card_fields.items() if value)
        raise CoderError(f"{edited_card} is kept as it is: write {names} there, or share the run anew")
    record = source.record or run_record(source.run, source.export.name)
    if source.record is None and (wise_ft := read_wise_ft(source.export)):
        record["wise_ft"] = wise_ft
    earlier_fields = record.get("stated", {})
    card_fields = {field: value or earlier_fields.get(field) or value for field, value in card_fields.items()}
    trained = open_pretrained(source.export, device="cpu")
    if record["objective"] is None and (source.export / HEADS).is_file():  # the heads' file has the objective
        objective = trained.model.coder.objective
        record = {**record, "objective": str(objective), "terms": bare_objective(objective.to_dict())}
    folder.mkdir(parents=True, exist_ok=True)
    write_export(trained.model, folder, tokenizer=trained.tokenizer, options=trained.inference_options())
    _remove_paths(folder)
    facts = _model_facts(trained)
    if facts["pictures"]:
        st.write_files(folder)
    new_record = {
        "format": 1,
        **{key: record[key] for key in ("objective", "terms", "options", "run", "results")},
        **({"wise_ft": record["wise_ft"]} if "wise_ft" in record else {}),
        "model": facts,
        "stated": card_fields,
        "written by": {"coder-plugin": version("coder-plugin")},
    }
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    if edited_card is not None:
        shutil.copyfile(edited_card, folder / CARD)
    else:
        try:
            text = card_text(name, new_record, sizes, on_hub="/" in name, **card_fields)
        except (AttributeError, KeyError, TypeError, ValueError, TemplateError) as error:
            if source.record is None:
                raise
            raise CoderError(f"{source.export / RECORD} lacks what a model card needs: {error!r}") from error
        (folder / CARD).write_text(text, encoding="utf-8")
    new_record["card"] = {"sha256": sha256_file(folder / CARD), "edited": edited_card is not None}
    _write_json(folder / RECORD, new_record)
    for path in folder.rglob("*"):
        if path.is_file():
            shutil.copymode(folder / RECORD, path)  # safetensors makes its files private, whatever the umask
    seal_again(folder)
    _check_same_model(trained, folder)


def _source(spec: str | Path, export: str | None) -> _Source:
    folder = fetch(spec)
    if export_files(folder)[0] is not None:
        run = folder.parent.parent  # RUN/export/best
        belongs_to_run = folder.parent.name == "export" and folder.name in ("best", "last") and (run / "config.json").is_file()
        return _Source(folder, run if belongs_to_run else None, read_record(folder))
    return _Source(export_folder(folder, export=export), folder, None)


def _edited_card(source: _Source) -> Path | None:
    """A card that somebody wrote or edited: it is kept. Any other card is written again, because the name may have changed."""
    card = source.export / CARD
    if not card.is_file():
        return None
    check_link(source.export, CARD)
    written = (source.record or {}).get("card", {})
    return card if written.get("edited") or sha256_file(card) != written.get("sha256") else None


def _model_facts(trained: PretrainedModel) -> dict[str, Any]:
    """Facts about a model for its card."""
    model = trained.model
    vocabularies = [getattr(head, "vocabulary", None) for head in model.coder.heads.values()]
    vocabulary = next((each for each in vocabularies if each is not None), None)
    class_name = type(model).__name__.removeprefix("Coder")
    return {
        "class": class_name,
        "library": "transformers" if isinstance(model, TransformersTowers) else "open_clip",
        "name": model.name if isinstance(model, Backbone) else class_name,
        "pictures": not isinstance(model, Backbone),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dimensions": trained.encode_texts(["a picture"]).shape[-1],
        "views": model.coder.views,
        "heads": list(model.coder.heads),
        "aggregator": model.coder.aggregator,
        "concepts": None if vocabulary is None else len(vocabulary),
        "re-ranks": trained.encoder().reranking is not None,
        "text tower": _text_tower(model),
        "max_regions": trained.config.max_regions if isinstance(model, Backbone) else None,
    }


def _text_tower(model: Any) -> str | None:
    """The Hugging Face text tower, by its name on the hub or the folder in the shared model; None if there is none."""
    name = (getattr(model, "coder_config", None) or {}).get("text_cfg", {}).get("hf_model_name")
    return None if name is None else _portable(name)


def _portable(name: str) -> str:
    """A text tower's name on the hub. For a path: the folder in the shared model, which open_clip reads relative to the
    working directory."""
    from coder_plugin.backbones.clip import TEXT_FOLDER

    local = name.startswith((".", "~")) or name.count("/") > 1 or Path(name).is_absolute() or Path(name).exists()
    return TEXT_FOLDER if local else name


def _remove_paths(folder: Path) -> None:
    """Remove paths of this machine from the JSON files."""
    for name in ("open_clip_config.json", plugin_backbones.CONFIG, VOCABULARY.replace(".safetensors", ".json")):
        if (folder / name).is_file():
            values = json.loads((folder / name).read_text(encoding="utf-8"))
            text_config = values.get("model_cfg", {}).get("text_cfg", {})
            for key in ("hf_model_name", "hf_tokenizer_name"):
                if text_config.get(key):
                    text_config[key] = _portable(text_config[key])
            if "settings" in values:
                settings = values["settings"].items()
                values["settings"] = {key: bare(value) if isinstance(value, str) else value for key, value in settings}
            _write_json(folder / name, without_paths(values))
    for path in (*folder.rglob("tokenizer_config.json"), *folder.rglob("text/config.json")):
        _write_json(path, without_paths(json.loads(path.read_text(encoding="utf-8"))))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_same_model(trained: PretrainedModel, folder: Path) -> None:
    shared = open_pretrained(folder, device=trained.device)
    before, after = _features(trained), _features(shared)
    if not all(each.isfinite().all() for each in before):
        raise CoderError(f"{trained.name} gives vectors with NaN or infinity: nothing was shared; share another export")
    equal = all(map(torch.equal, before, after))
    if not equal or shared.fingerprint() != trained.fingerprint():
        raise CoderError(
            f"{folder} opens as another model than {trained.name}: nothing was shared; please report this as a bug"
        )


def _features(trained: PretrainedModel) -> list[Tensor]:
    """Features of a generated image, or of generated regions, and of two texts.

    They also show settings that are neither in the weights nor in the fingerprint.
    """
    if isinstance(trained.model, Backbone):
        with torch.no_grad():
            image = trained.model.embed_image(trained.model.example_image(1))
    else:
        pixels = torch.randint(0, 256, (97 * 61 * 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        image = trained.encode_images([Image.frombytes("RGB", (97, 61), pixels.numpy().tobytes())])
    return [image, trained.encode_texts(_TEXTS)]
