"""Data sets that are a table of image files and captions: CSV as open_clip reads it, and Karpathy's split files."""

from __future__ import annotations

import csv
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from PIL.Image import Image

from coder_plugin.data.item import Item
from coder_plugin.data.source import ItemSource, check_captions, decode_image
from coder_plugin.errors import CoderError


def open_csv(
    spec: str,
    *,
    split: str = "train",
    csv_separator: str = "\t",
    csv_img_key: str = "filepath",
    csv_caption_key: str = "title",
) -> ItemSource:
    """A table with one row per caption and a header. Rows that name the same file are captions of one image, in order.

    The file holds one split, so ``split`` is not looked at. A relative path counts from the working directory, as in
    open_clip, else from the table's folder, so that a data set can be moved as a whole.
    """
    separator = csv_separator.replace("\\t", "\t")  # a shell hands over the two characters
    if len(separator) != 1:
        raise CoderError(f"csv separator is {csv_separator!r}; it must be one character")
    captions: dict[str, list[str]] = {}
    try:
        with open(spec, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, delimiter=separator)
            present = list(rows.fieldnames or ())
            for column, flag in ((csv_img_key, "--csv-img-key"), (csv_caption_key, "--csv-caption-key")):
                if column not in present:
                    there = ", ".join(map(repr, present)) or "none"
                    raise CoderError(
                        f"{spec}: no column {column!r} ({flag}); split at {separator!r} there are: {there}"
                    )
            for row in rows:
                if None in row or None in row.values():
                    raise CoderError(f"{spec}: line {rows.line_num} does not have {len(present)} columns")
                if not row[csv_img_key].strip():
                    raise CoderError(f"{spec}: line {rows.line_num} names no image in column {csv_img_key!r}")
                check_captions(f"{spec}, line {rows.line_num}", row[csv_img_key], (row[csv_caption_key],))
                captions.setdefault(row[csv_img_key], []).append(row[csv_caption_key])
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise CoderError(f"{spec}: cannot be read as a table: {_reason(exc)}") from exc
    folder = Path(spec).resolve().parent
    items = [Item(path, tuple(texts), partial(_load, path, folder / path)) for path, texts in captions.items()]
    return ItemSource(items, name=spec)


def open_karpathy(spec: str, *, split: str = "train", images: str | None = None, restval: bool = True) -> ItemSource:
    """One split of a ``dataset_*.json`` as Karpathy publishes them for Flickr8k, Flickr30K and COCO.

    ``images`` is the folder of the pictures (default: ``images`` beside the file, else the file's folder); COCO's
    ``filepath`` counts from there. With ``restval`` the pictures COCO's authors left over are trained on, as is usual.
    """
    root = Path(images) if images is not None else _image_folder(Path(spec))
    if not root.is_dir():
        raise CoderError(f"{spec}: image folder {str(root)!r} does not exist")
    wanted = {split, "restval"} if split == "train" and restval else {split}
    entries = _entries(spec)
    chosen = [(number, entry) for number, entry in enumerate(entries) if entry.get("split") in wanted]
    if not chosen:
        there = ", ".join(sorted({str(entry.get("split")) for entry in entries})) or "none"
        raise CoderError(f"{spec}: no images in split {split!r}; splits present: {there}")
    return ItemSource([_item(spec, root, number, entry) for number, entry in chosen], name=f"{spec} ({split})")


def _entries(spec: str) -> list[dict[str, Any]]:
    try:
        with open(spec, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as exc:
        raise CoderError(f"{spec}: cannot be read as JSON: {_reason(exc)}") from exc
    entries = content.get("images") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CoderError(f"{spec}: not in Karpathy's format: no list 'images' of objects")
    return entries


def _item(spec: str, root: Path, number: int, entry: dict[str, Any]) -> Item:
    name, sentences = entry.get("filename"), entry.get("sentences", [])
    if not isinstance(name, str) or not name:
        raise CoderError(f"{spec}: images[{number}] has no 'filename'")
    key = os.path.join(entry.get("filepath") or "", name)
    if not isinstance(sentences, list) or not all(isinstance(each, dict) and "raw" in each for each in sentences):
        raise CoderError(f"{spec}: image {key!r}: 'sentences' is not a list of objects with 'raw'")
    captions = check_captions(spec, key, [each["raw"] for each in sentences])
    return Item(key, captions, partial(decode_image, str(root / key)))


def _image_folder(spec: Path) -> Path:
    beside = spec.parent / "images"
    return beside if beside.is_dir() else spec.parent


def _load(path: str, otherwise: Path) -> Image:
    """Looked up when loaded: asking for a hundred thousand files at the start takes minutes on a network drive."""
    return decode_image(path if os.path.exists(path) else str(otherwise))


def _reason(exc: Exception) -> str:
    return exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
