"""Read captions as other projects publish them: COCO's annotations, SCAN's caption lists, img2dataset's folders."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coder_plugin.data import PICTURES
from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.item import Item, bad_item
from coder_plugin.data.regions.precomp_text import are_row_numbers, lines_of
from coder_plugin.data.source import ItemSource
from coder_plugin.data.tables import (
    duplicates,
    is_name,
    no_picture,
    other_names,
    picture_folder,
    picture_of,
    read_json,
    refuse,
)
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)


# COCO


def open_coco(spec: str, *, split: str = "train", image_root: str | None = None, pictures: bool = True) -> ItemSource:
    """The reader ``coco``: COCO's ``captions_*.json`` with lists ``images`` and ``annotations``.

    Images and captions come in the file's order, which is not that of annotation ids. Images without captions are left out
    with a warning; one with a faulty caption is a bad sample.

    Args:
        spec: the file.
        split: not used, since a file holds one split.
        image_root: default: ``train2014`` (of ``captions_train2014.json``) in the file's folder or its parent, or in an
            ``images`` there; else ``images``, else the file's folder.
        pictures: as in :func:`~coder_plugin.data.open_source`.

    An image's key is its file name, its other name its id; captions are named by their ids.

    Raises:
        CoderError: another format, duplicate ids or files, captions of unknown images, no captions at all.
    """
    root = picture_folder(spec, image_root or _coco_folder(Path(spec))) if pictures else None
    content = read_json(spec)
    entries, annotations = _objects(spec, content, "images"), _objects(spec, content, "annotations")

    names: list[tuple[Any, Any]] = [(each.get("id"), each.get("file_name")) for each in entries]
    nameless = [n for n, (number, name) in enumerate(names) if not is_name(number) or not (name and isinstance(name, str))]
    refuse(spec, [f"images[{n}]" for n in nameless], "images without an 'id' or a 'file_name'")
    for field, values in zip(("id", "file_name"), zip(*names, strict=True), strict=False):
        refuse(spec, [repr(value) for value in duplicates(values)], f"images that share their {field!r} with another")
    captions: dict[Any, list[tuple[Any, Any]]] = {number: [] for number, _ in names}
    foreign = []
    for n, each in enumerate(annotations):
        number, caption, image = each.get("id"), each.get("caption"), each.get("image_id")
        if is_name(image) and image in captions:
            captions[image].append((caption, number))
        else:
            foreign.append(f"annotations[{n}], id {number!r}, of image {image!r}")
    refuse(spec, foreign, "annotations of an image that is not in 'images'")
    repeated = duplicates(each["id"] for each in annotations if is_name(each.get("id")))
    refuse(spec, [repr(number) for number in repeated], "annotations that share their 'id' with another")

    uncaptioned = [name for number, name in names if not captions[number]]
    if len(uncaptioned) == len(names):
        raise CoderError(f"{spec}: none of the {len(names)} images has a caption; COCO publishes none for test images")
    if uncaptioned:
        numbers = len(uncaptioned), len(names)
        log.warning("%s: left out %d of %d images without captions, the first: %r", spec, *numbers, uncaptioned[0])
    items = []
    for number, name in names:
        if captions[number]:
            texts, ids = zip(*captions[number], strict=True)
            ids = other_names(*ids)
            items.append(Item(name, texts, names=other_names(number), caption_names=ids, **picture_of(name, root)))
    return ItemSource(items, name=spec)


def _objects(spec: str, content: Any, field: str) -> list[dict[str, Any]]:
    objects = content.get(field) if isinstance(content, dict) else None
    if not isinstance(objects, list) or not all(isinstance(each, dict) for each in objects):
        raise CoderError(f"{spec}: not in the format of COCO's captions_*.json: no list {field!r} of objects")
    return objects


def _coco_folder(spec: Path) -> Path:
    year = spec.stem.rpartition("_")[2]
    parents = (spec.parent, spec.parent.parent)
    folders = [folder / year for parent in parents for folder in (parent, parent / "images")]
    return next(filter(Path.is_dir, [*folders, spec.parent / "images"]), spec.parent)


# SCAN


def open_caps(spec: str, *, split: str = "train") -> ItemSource:
    """The reader ``caps``: ``{split}_caps.txt``, a caption a line, as SCAN and others publish it with their features.

    ``{split}_ids.txt`` in the same folder has an id for each caption, or for each image with the same number of captions.
    Without it an image has five successive lines. Without it, or with ids that are row numbers and so repeat in every split,
    image n of ``train_caps.txt`` has the key ``train_n`` and its id as other name. Lines such as ``b'a dog'`` are read as
    ``a dog``. There are no pictures: features come from other files.

    Args:
        spec: the file.
        split: not used, since a file holds one split.

    Raises:
        CoderError: empty lines, duplicate ids, or numbers of lines that do not fit.
    """
    path = Path(spec)
    captions = lines_of(path)
    ids = path.with_name(f"{path.name.removesuffix('caps.txt')}ids.txt")
    if path.name.endswith("caps.txt") and ids.exists():
        owners = _owners(path, ids, len(captions))
    elif len(captions) % 5:
        raise CoderError(f"{path}: {len(captions)} captions are not five for each image: put a file of ids into its folder")
    else:
        owners = [str(line // 5) for line in range(len(captions))]
    grouped = defaultdict(list)
    for owner, caption in zip(owners, captions, strict=True):
        grouped[owner].append(caption)
    row_numbers = are_row_numbers(list(grouped))
    items = []
    for row, (owner, texts) in enumerate(grouped.items()):
        key = f"{path.stem.removesuffix('_caps')}_{row}" if row_numbers else owner
        items.append(Item(key, tuple(texts), partial(no_picture, key), (owner,) if row_numbers else ()))
    return ItemSource(items, name=spec)


def _owners(path: Path, ids: Path, captions: int) -> list[str]:
    names = lines_of(ids)
    if len(names) == captions:
        return names
    if not names or captions % len(names):
        raise CoderError(
            f"{path}: {captions} captions, but {len(names)} ids in {ids.name}: give an id for each caption, or the same "
            "number of captions for each id"
        )
    refuse(ids, [repr(name) for name in duplicates(names)], "ids of two or more images")
    return [name for name in names for _ in range(captions // len(names))]


# img2dataset


def open_img2dataset(spec: str, *, split: str = "train", metadata: Sequence[str] = ()) -> ItemSource:
    """The reader ``img2dataset``: a folder of ``output_format="files"``: ``00000/000000000.jpg``, ``.txt`` and ``.json``.

    The caption is that of ``txt``, else of ``json``. Images that were not downloaded or have no picture or caption are left out
    with a warning; one with a faulty ``json`` or ``txt`` is a bad sample. Keys are those of img2dataset's tars.

    Args:
        spec: the folder.
        split: not used, since a folder holds one split.
        metadata: as in :func:`~coder_plugin.data.open_source`.

    Raises:
        CoderError: no such folders, or no images.
    """
    try:
        folders = sorted(entry.path for entry in os.scandir(spec) if entry.name.isdigit() and entry.is_dir())
    except OSError as exc:
        raise CoderError(f"{spec}: cannot be read as a folder: {exc.strerror}") from exc
    if not folders:
        raise CoderError(
            f"{spec}: no folders such as '00000' of img2dataset's output_format 'files'; give its tars as "
            f"'{spec}/*.tar'; its parquet and tfrecord formats cannot be read"
        )
    items: list[Item] = []
    left_out = defaultdict(list)
    for folder in map(Path, folders):
        samples: dict[str, dict[str, Path]] = defaultdict(dict)  # files by ending, of each key
        for name in sorted(os.listdir(folder)):
            stem, ending = os.path.splitext(name)
            if ending.lower() in (*PICTURES, ".txt", ".json"):
                samples[f"{folder.name}/{stem}"][ending.lower()] = folder / name
        for key, files in samples.items():
            try:
                item = _img2dataset_item(key, files, metadata)
            except BadSample as fault:
                item = bad_item(key, fault.with_traceback(None))
            if isinstance(item, Item):
                items.append(item)
            else:
                left_out[item].append(key)
    reasons = [f"left out {len(keys)} images {reason}, the first: {keys[0]!r}" for reason, keys in left_out.items()]
    if not items:
        raise CoderError("; ".join([f"{spec}: no images", *reasons]))
    for each in reasons:
        log.warning("%s: %s", spec, each)
    return ItemSource(items, name=spec)


def _img2dataset_item(key: str, files: dict[str, Path], kept: Sequence[str]) -> Item | str:
    """The item, or the reason why it is left out; ``BadSample`` where its json or txt is faulty."""
    try:
        metadata = read_json(files[".json"]) if ".json" in files else {}
    except CoderError as exc:
        raise BadSample("caption", str(exc)) from None
    if not isinstance(metadata, dict):
        raise BadSample("caption", f"{files['.json']}: not an object, as img2dataset writes them")
    if metadata.get("status") not in (None, "success"):
        return "that were not downloaded (status)"
    picture = next((files[ending] for ending in PICTURES if ending in files), None)
    if picture is None:
        return "without a picture"
    caption = metadata.get("caption")
    if ".txt" in files:
        try:
            caption = files[".txt"].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise BadSample("caption", f"{files['.txt']}: cannot be read as text: {exc}") from None
    if caption is not None and not isinstance(caption, str):
        raise BadSample("caption", f"{files['.json']}: 'caption' is not text")
    if caption is None or not caption.strip():
        return "without a caption"
    names = other_names(picture.stem, metadata.get("key"), metadata.get("uid"))
    kept_values = {name: metadata.get(name) for name in kept}
    return Item(key, (caption.strip(),), names=names, metadata=kept_values, **picture_of(picture.name, picture.parent))
