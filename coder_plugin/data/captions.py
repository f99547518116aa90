"""Read captions as other projects publish them: COCO's annotations, SCAN's caption lists, img2dataset's folders."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.decode import PICTURES, check_max_pixels
from coder_plugin.data.item import Item, bad_item
from coder_plugin.data.regions.precomp_text import are_row_numbers, decode_bytes_repr
from coder_plugin.data.source import ItemSource
from coder_plugin.data.tables import (
    duplicates,
    is_name,
    loader,
    no_picture,
    other_names,
    picture_folder,
    picture_paths,
    read_json,
    refuse,
)
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)


# COCO


def open_coco(
    spec: str, *, split: str = "train", images: str | None = None, pictures: bool = True, max_pixels: int | None = None
) -> ItemSource:
    """The reader ``coco``: COCO's ``captions_*.json`` with lists ``images`` and ``annotations``.

    Images and captions come in the file's order, which is not that of annotation ids. Images without captions are left out
    with a warning; one with a faulty caption is a bad sample.

    Args:
        spec: the file.
        split: not used, since a file holds one split.
        images: folder of the pictures. Default: ``train2014`` (of ``captions_train2014.json``) in the file's folder or its
            parent, or in an ``images`` there; else ``images``, else the file's folder.
        pictures: False if only the captions are needed, for features from other files.
        max_pixels: as in :func:`~coder_plugin.data.decode.decode_image`.

    An image's key is its file name, its other name its id; captions are named by their ids.

    Raises:
        CoderError: another format, duplicate ids or files, captions of unknown images, no captions at all.
    """
    check_max_pixels(max_pixels)
    root = picture_folder(spec, images or _coco_folder(Path(spec))) if pictures else None
    content = read_json(spec)
    files = _coco_files(spec, _objects(spec, content, "images"))
    captions = _coco_captions(spec, _objects(spec, content, "annotations"), set(files))
    uncaptioned = [files[number] for number in files if number not in captions]
    if not captions:
        raise CoderError(f"{spec}: none of the {len(uncaptioned)} images has a caption; COCO publishes none for test images")
    if uncaptioned:
        numbers = len(uncaptioned), len(files)
        log.warning("%s: left out %d of %d images without captions, the first: %r", spec, *numbers, uncaptioned[0])
    items = [
        Item(
            name,
            tuple(text for text, _ in captions[number]),
            loader(root, name, max_pixels),
            other_names(number),
            caption_names=other_names(*(caption for _, caption in captions[number])),
            paths=picture_paths(root, name),
        )
        for number, name in files.items()
        if number in captions
    ]
    return ItemSource(items, name=spec)


def _objects(spec: str, content: Any, field: str) -> list[dict[str, Any]]:
    objects = content.get(field) if isinstance(content, dict) else None
    if not isinstance(objects, list) or not all(isinstance(each, dict) for each in objects):
        raise CoderError(f"{spec}: not in the format of COCO's captions_*.json: no list {field!r} of objects")
    return objects


def _coco_files(spec: str, entries: list[dict[str, Any]]) -> dict[int | str, str]:
    """File names by image id, in the file's order."""
    names = [(each.get("id"), each.get("file_name")) for each in entries]
    nameless = [n for n, (number, name) in enumerate(names) if not is_name(number) or not (name and isinstance(name, str))]
    refuse(spec, [f"images[{n}]" for n in nameless], "images without an 'id' or a 'file_name'")
    for field, values in zip(("id", "file_name"), zip(*names, strict=True), strict=False):
        refuse(spec, [repr(value) for value in duplicates(values)], f"images that share their {field!r} with another")
    return dict(names)  # type: ignore[arg-type]


def _coco_captions(
    spec: str, entries: list[dict[str, Any]], images: set[int | str]
) -> dict[int | str, list[tuple[Any, Any]]]:
    """Captions, whatever they hold, and their ids by image id, in the file's order."""
    captions: dict[int | str, list[tuple[Any, Any]]] = {}
    foreign = []
    for number, each in enumerate(entries):
        entry = f"annotations[{number}], id {each.get('id')!r}, of image {each.get('image_id')!r}"
        image = each.get("image_id")
        if not is_name(image) or image not in images:
            foreign.append(entry)
        else:
            captions.setdefault(image, []).append((each.get("caption"), each.get("id")))
    refuse(spec, foreign, "annotations of an image that is not in 'images'")
    repeated = duplicates(each["id"] for each in entries if is_name(each.get("id")))
    refuse(spec, [repr(number) for number in repeated], "annotations that share their 'id' with another")
    return captions


def _coco_folder(spec: Path) -> Path:
    year = spec.stem.rpartition("_")[2]
    parents = (spec.parent, spec.parent.parent)
    folders = [folder / year for parent in parents for folder in (parent, parent / "images")]
    return next(filter(Path.is_dir, [*folders, spec.parent / "images"]), spec.parent)


# SCAN


def open_caps(spec: str, *, split: str = "train", captions_per_image: int = 5) -> ItemSource:
    """The reader ``caps``: ``{split}_caps.txt``, a caption a line, as SCAN and others publish it with their features.

    ``{split}_ids.txt`` in the same folder has an id for each caption, or for each image with the same number of captions.
    Without it, or with ids that are row numbers and so repeat in every split, image n of ``train_caps.txt`` has the key
    ``train_n`` and its id as other name. Lines such as ``b'a dog'`` are read as ``a dog``. There are no pictures: features
    come from other files.

    Args:
        spec: the file.
        split: not used, since a file holds one split.
        captions_per_image: successive lines of an image where there are no ids.

    Raises:
        CoderError: empty lines, duplicate ids, or numbers of lines that do not fit.
    """
    path = Path(spec)
    captions = _lines(path, "empty captions")
    ids = path.with_name(f"{path.name.removesuffix('caps.txt')}ids.txt")
    has_ids = path.name.endswith("caps.txt") and ids.exists()
    owners = _owners(path, ids, len(captions)) if has_ids else _numbers(path, len(captions), captions_per_image)
    grouped: dict[str, list[str]] = {}
    for owner, caption in zip(owners, captions, strict=True):
        grouped.setdefault(owner, []).append(caption)
    row_numbers = are_row_numbers(list(grouped))
    items = []
    for row, (owner, texts) in enumerate(grouped.items()):
        key = f"{path.stem.removesuffix('_caps')}_{row}" if row_numbers else owner
        items.append(Item(key, tuple(texts), partial(no_picture, key), (owner,) if row_numbers else ()))
    return ItemSource(items, name=spec)


def _owners(path: Path, ids: Path, captions: int) -> list[str]:
    names = _lines(ids, "lines without an id")
    if len(names) == captions:
        return names
    if not names or captions % len(names):
        raise CoderError(
            f"{path}: {captions} captions, but {len(names)} ids in {ids.name}: give an id for each caption, or the same "
            "number of captions for each id"
        )
    refuse(ids, [repr(name) for name in duplicates(names)], "ids of two or more images")
    return [name for name in names for _ in range(captions // len(names))]


def _numbers(path: Path, captions: int, each: int) -> list[str]:
    if each < 1 or captions % each:
        raise CoderError(
            f"{path}: {captions} captions are not a multiple of captions_per_image={each}; give another number, "
            "or put a file of ids into its folder"
        )
    return [str(line // each) for line in range(captions)]


def _lines(path: Path, empty: str) -> list[str]:
    """The lines of a file, separated by line feeds only, as in tools that read it in binary."""
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


def open_img2dataset(
    spec: str, *, split: str = "train", max_pixels: int | None = None, metadata: Sequence[str] = ()
) -> ItemSource:
    """The reader ``img2dataset``: a folder of ``output_format="files"``: ``00000/000000000.jpg``, ``.txt`` and ``.json``.

    The caption is that of ``txt``, else of ``json``. Images that were not downloaded or have no picture or caption are left out
    with a warning; one with a faulty ``json`` or ``txt`` is a bad sample.

    Keys are those of img2dataset's tars, which the reader ``webdataset`` reads.

    Args:
        spec: the folder.
        split: not used, since a folder holds one split.
        max_pixels: as in :func:`~coder_plugin.data.decode.decode_image`.
        metadata: further fields of ``json`` whose values an item keeps; it may lack them.

    Raises:
        CoderError: no such folders, or no images.
    """
    check_max_pixels(max_pixels)
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
    skipped: dict[str, list[str]] = {}
    for folder in folders:
        for key, files in _samples(Path(folder)):
            try:
                item = _img2dataset_item(key, files, max_pixels, metadata)
            except BadSample as fault:
                item = bad_item(key, fault.with_traceback(None))
            if isinstance(item, Item):
                items.append(item)
            else:
                skipped.setdefault(item, []).append(key)
    reasons = [f"{len(keys)} images {reason}, the first: {keys[0]!r}" for reason, keys in skipped.items()]
    if not items:
        raise CoderError(f"{spec}: no images" + "".join(f"; left out {each}" for each in reasons))
    for each in reasons:
        log.warning("%s: left out %s", spec, each)
    return ItemSource(items, name=spec)


def _samples(folder: Path) -> Iterator[tuple[str, dict[str, Path]]]:
    """Keys, and their files by ending, in alphabetical order."""
    samples: dict[str, dict[str, Path]] = {}
    for name in sorted(os.listdir(folder)):
        stem, _, ending = name.rpartition(".")
        if stem and ending.lower() in (*PICTURES, "txt", "json"):
            samples.setdefault(stem, {})[ending.lower()] = folder / name
    for stem, files in samples.items():
        yield f"{folder.name}/{stem}", files


def _img2dataset_item(
    key: str, files: dict[str, Path], max_pixels: int | None, kept: Sequence[str]
) -> Item | str:
    """The item, or the reason why it is left out; ``BadSample`` where its json or txt is faulty."""
    try:
        metadata = read_json(files["json"]) if "json" in files else {}
    except CoderError as exc:
        raise BadSample("json", str(exc)) from None
    if not isinstance(metadata, dict):
        raise BadSample("json", f"{files['json']}: not an object, as img2dataset writes them")
    if metadata.get("status") not in (None, "success"):
        return "that were not downloaded (status)"
    picture = next((files[ending] for ending in PICTURES if ending in files), None)
    if picture is None:
        return "without a picture"
    caption = metadata.get("caption")
    if "txt" in files:
        try:
            caption = files["txt"].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise BadSample("caption", f"{files['txt']}: cannot be read as text: {exc}") from None
    if caption is not None and not isinstance(caption, str):
        raise BadSample("caption", f"{files['json']}: 'caption' is not text")
    if caption is None or not caption.strip():
        return "without a caption"
    names = other_names(picture.stem, metadata.get("key"), metadata.get("uid"))
    load, paths = loader(picture.parent, picture.name, max_pixels), picture_paths(picture.parent, picture.name)
    return Item(key, (caption.strip(),), load, names, paths=paths, metadata={name: metadata.get(name) for name in kept})
