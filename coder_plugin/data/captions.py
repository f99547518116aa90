"""Captions as other projects publish them: COCO's annotations, the caption lists beside SCAN's features, and the folders
that img2dataset downloads into."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from coder_plugin.data.item import Item
from coder_plugin.data.regions.precomp_text import are_row_numbers, decode_bytes_repr
from coder_plugin.data.source import PICTURES, ItemSource
from coder_plugin.data.tables import (
    is_name,
    loader,
    no_picture,
    other_names,
    picture_folder,
    read_json,
    refuse,
    twice,
)
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)


# COCO


def open_coco(spec: str, *, split: str = "train", images: str | None = None, pictures: bool = True) -> ItemSource:
    """A ``captions_*.json`` as COCO publishes it, with lists ``images`` and ``annotations``.

    The file holds one split, so ``split`` is not looked at. Images and the captions of each come in the file's order,
    which is not that of annotation ids. Images without captions are left out, with a warning. ``images`` is the folder of
    the pictures; by default one named as the file's ending (``train2014`` of ``captions_train2014.json``) in or beside the
    file's folder, or in an ``images`` there; else the file's folder. Without ``pictures`` it is not looked for. An image is
    also known by its number, and a caption by its own.

    Raises:
        CoderError: not this format; ids or files named twice, captions of unknown images or without text: how many, and
            the first of them; no image with captions.
    """
    root = picture_folder(spec, images or _coco_folder(Path(spec))) if pictures else None
    content = read_json(spec)
    files = _coco_files(spec, _objects(spec, content, "images"))
    captions = _coco_captions(spec, _objects(spec, content, "annotations"), set(files))
    bare = [files[number] for number in files if number not in captions]
    if not captions:
        raise CoderError(f"{spec}: none of the {len(bare)} images has a caption; COCO publishes none for its test images")
    if bare:
        log.warning("%s: left out %d of %d images without captions, the first: %r", spec, len(bare), len(files), bare[0])
    items = [
        Item(
            name,
            tuple(text for text, _ in captions[number]),
            loader(root, name),
            other_names(number),
            caption_names=other_names(*(caption for _, caption in captions[number])),
        )
        for number, name in files.items()
        if number in captions
    ]
    return ItemSource(items, name=spec)


def _objects(spec: str, content: Any, field: str) -> list[dict[str, Any]]:
    found = content.get(field) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise CoderError(f"{spec}: not in the format of COCO's captions_*.json: no list {field!r} of objects")
    return found


def _coco_files(spec: str, entries: list[dict[str, Any]]) -> dict[int | str, str]:
    """File names by image id, in the file's order."""
    names = [(each.get("id"), each.get("file_name")) for each in entries]
    nameless = [n for n, (number, name) in enumerate(names) if not is_name(number) or not (name and isinstance(name, str))]
    refuse(spec, [f"images[{n}]" for n in nameless], "images without an 'id' or a 'file_name'")
    for field, values in zip(("id", "file_name"), zip(*names, strict=True), strict=False):
        refuse(spec, [repr(value) for value in twice(values)], f"images that share their {field!r} with another")
    return dict(names)  # type: ignore[arg-type]


def _coco_captions(
    spec: str, entries: list[dict[str, Any]], known: set[int | str]
) -> dict[int | str, list[tuple[str, Any]]]:
    """Captions and their ids by image id, in the file's order."""
    captions: dict[int | str, list[tuple[str, Any]]] = {}
    textless, strangers = [], []
    for number, each in enumerate(entries):
        place = f"annotations[{number}], id {each.get('id')!r}, of image {each.get('image_id')!r}"
        image, text = each.get("image_id"), each.get("caption")
        if not isinstance(text, str) or not text.strip():
            textless.append(place)
        elif not is_name(image) or image not in known:
            strangers.append(place)
        else:
            captions.setdefault(image, []).append((text, each.get("id")))
    refuse(spec, textless, "annotations whose 'caption' is absent, empty or not text")
    refuse(spec, strangers, "annotations of an image that is not in 'images'")
    repeated = twice(each["id"] for each in entries if is_name(each.get("id")))
    refuse(spec, [repr(number) for number in repeated], "annotations that share their 'id' with another")
    return captions


def _coco_folder(spec: Path) -> Path:
    year = spec.stem.rpartition("_")[2]
    above = (spec.parent, spec.parent.parent)
    places = [place / year for folder in above for place in (folder, folder / "images")]
    return next(filter(Path.is_dir, [*places, spec.parent / "images"]), spec.parent)


# SCAN


def open_caps(spec: str, *, split: str = "train", captions_per_image: int = 5) -> ItemSource:
    """A ``{split}_caps.txt``, a caption a line, as SCAN and its followers publish it with their features.

    The file holds one split, so ``split`` is not looked at. If there is a ``{split}_ids.txt`` beside it, it says whose the
    captions are: an id a caption, or an id an image with as many captions for each. Otherwise ``captions_per_image`` lines
    follow each other, and image n of ``train_caps.txt`` has the key ``train_n``, being also known as ``n``; so it has where
    ids only count (0, 1, 2 …), which are the same in every split, being also known by its id. Lines that Python 3 wrote as
    bytes (``b'a dog'``) are read as the text they stand for. There are no pictures: features come from elsewhere.

    Raises:
        CoderError: empty lines, ids named twice, numbers of lines that do not fit each other.
    """
    path = Path(spec)
    captions = _lines(path, "empty captions")
    ids = path.with_name(f"{path.name.removesuffix('caps.txt')}ids.txt")
    named = path.name.endswith("caps.txt") and ids.exists()
    owners = _owners(path, ids, len(captions)) if named else _numbers(path, len(captions), captions_per_image)
    grouped: dict[str, list[str]] = {}
    for owner, caption in zip(owners, captions, strict=True):
        grouped.setdefault(owner, []).append(caption)
    counted = are_row_numbers(list(grouped))
    items = []
    for place, (owner, texts) in enumerate(grouped.items()):
        key = f"{path.stem.removesuffix('_caps')}_{place}" if counted else owner
        items.append(Item(key, tuple(texts), partial(no_picture, key), (owner,) if counted else ()))
    return ItemSource(items, name=spec)


def _owners(path: Path, ids: Path, captions: int) -> list[str]:
    names = _lines(ids, "lines without an id")
    if len(names) == captions:
        return names
    if not names or captions % len(names):
        raise CoderError(
            f"{path}: {captions} captions beside {len(names)} ids in {ids.name}: there must be as many ids, or a whole "
            "number of captions for each id"
        )
    refuse(ids, [repr(name) for name in twice(names)], "ids of two images or more")
    return [name for name in names for _ in range(captions // len(names))]


def _numbers(path: Path, captions: int, each: int) -> list[str]:
    if each < 1 or captions % each:
        raise CoderError(
            f"{path}: {captions} captions are not captions_per_image={each} for every image; give another number, "
            "or put a file of ids beside it"
        )
    return [str(line // each) for line in range(captions)]


def _lines(path: Path, empty: str) -> list[str]:
    """The lines of a file. Only a line feed ends one, as for those who read it in binary: the features are counted so."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise CoderError(f"{path}: cannot be read as lines of text: {reason}") from exc
    lines = [decode_bytes_repr(line.strip()) for line in text.removesuffix("\n").split("\n")] if text else []
    refuse(path, [f"line {number}" for number, line in enumerate(lines, 1) if line is None], "bytes that are not UTF-8")
    refuse(path, [f"line {number}" for number, line in enumerate(lines, 1) if not line], empty)
    return [line for line in lines if line]


# img2dataset


def open_img2dataset(spec: str, *, split: str = "train") -> ItemSource:
    """The folder that img2dataset's ``output_format="files"`` makes: ``00000/000000000.jpg``, ``.txt`` and ``.json``.

    It holds one split, so ``split`` is not looked at. The caption is that of ``txt``, else of ``json``. What was not
    downloaded, has no picture or no caption is left out, with a warning. Keys are as in img2dataset's tars, which
    the reader ``webdataset`` reads; its parquet and TFRecord files are not read.

    Raises:
        CoderError: no such folders; a ``json`` or ``txt`` that cannot be read or is of another type; nothing left.
    """
    try:
        folders = sorted(entry.path for entry in os.scandir(spec) if entry.name.isdigit() and entry.is_dir())
    except OSError as exc:
        raise CoderError(f"{spec}: cannot be read as a folder: {exc.strerror}") from exc
    if not folders:
        raise CoderError(
            f"{spec}: no folders such as '00000', as img2dataset's output_format 'files' makes them; give its tars as "
            f"'{spec}/*.tar'; its parquet and tfrecord formats are not read"
        )
    items: list[Item] = []
    left: dict[str, list[str]] = {}
    for folder in folders:
        for key, files in _samples(Path(folder)):
            found = _img2dataset_item(key, files)
            if isinstance(found, Item):
                items.append(found)
            else:
                left.setdefault(found, []).append(key)
    told = [f"{len(keys)} images {reason}, the first: {keys[0]!r}" for reason, keys in left.items()]
    if not items:
        raise CoderError(f"{spec}: no images" + "".join(f"; left out {each}" for each in told))
    for each in told:
        log.warning("%s: left out %s", spec, each)
    return ItemSource(items, name=spec)


def _samples(folder: Path) -> Iterator[tuple[str, dict[str, Path]]]:
    """Keys, and files by their ending, in the order of their names."""
    samples: dict[str, dict[str, Path]] = {}
    for name in sorted(os.listdir(folder)):
        stem, _, ending = name.rpartition(".")
        if stem and ending.lower() in (*PICTURES, "txt", "json"):
            samples.setdefault(stem, {})[ending.lower()] = folder / name
    for stem, files in samples.items():
        yield f"{folder.name}/{stem}", files


def _img2dataset_item(key: str, files: dict[str, Path]) -> Item | str:
    """The image, or why there is none."""
    note = read_json(files["json"]) if "json" in files else {}
    if not isinstance(note, dict):
        raise CoderError(f"{files['json']}: not an object, as img2dataset writes them")
    if note.get("status") not in (None, "success"):
        return "that were not downloaded (status)"
    picture = next((files[ending] for ending in PICTURES if ending in files), None)
    if picture is None:
        return "without a picture"
    caption = note.get("caption")
    if "txt" in files:
        try:
            caption = files["txt"].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise CoderError(f"{files['txt']}: cannot be read as text: {exc}") from exc
    if caption is not None and not isinstance(caption, str):
        raise CoderError(f"{files['json']}: 'caption' is not text")
    if caption is None or not caption.strip():
        return "without a caption"
    names = other_names(picture.stem, note.get("key"), note.get("uid"))
    return Item(key, (caption.strip(),), loader(picture.parent, picture.name), names)
