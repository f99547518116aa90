"""Read tables of image files and captions: CSV files as in open_clip, and Karpathy's split files."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from PIL.Image import Image

from coder_plugin import files
from coder_plugin.data.bad_samples import BadSample, shorten
from coder_plugin.data.decode import decode_image
from coder_plugin.data.hard_negatives import NEGATIVES
from coder_plugin.data.item import Item, bad_item
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.source import ItemSource, check_captions, check_negatives
from coder_plugin.data.table_rows import read_lines, read_rows
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)

#: What may separate the columns of a table, open_clip's default first.
_SEPARATORS = "\t,;|"
_URL = re.compile("[a-z][a-z0-9+.-]*://", re.IGNORECASE)
#: Most bytes of a JSON file of captions.
_MOST_BYTES = 1 << 31


@dataclass
class _Rows:
    """What a table's rows say of one image."""

    metadata: dict[str, Any]
    captions: list[str] = field(default_factory=list)
    negatives: dict[str, None] = field(default_factory=dict)
    fault: BadSample | None = None


def open_csv(
    spec: str,
    *,
    split: str = "train",
    csv_separator: str | None = None,
    csv_img_key: str = "filepath",
    csv_caption_key: str = "title",
    negatives_key: str | None = None,
    image_root: str | None = None,
    pictures: bool = True,
    metadata: Sequence[str] = (),
) -> ItemSource:
    """The reader ``csv``: a table with a header and one row a caption. Rows with the same file are one image's captions.

    Quotes are those of Python's ``csv``: a field that begins with one ends at the next, and may run over several lines.
    Where such lines are rows themselves, the quote was never closed: it is then read as a character, with a warning.

    Args:
        spec: the table.
        split: not used, since a table holds one split.
        csv_separator: one character; None: the tab, comma, semicolon or bar that separates the named columns in the header.
        csv_img_key, csv_caption_key: names of the columns.
        negatives_key: column of JSON lists of texts; an image has those of all of its rows. Only ``negatives`` may be absent.
        image_root: for paths that it does not have, the working directory (as in open_clip), else the table's folder.
        pictures, metadata: as in :func:`~coder_plugin.data.open_source`; an item keeps the values of its first row.

    An image's key is its path, its other name the file name without ending. A row of another length, without an image or with
    an empty caption, or with faulty hard negatives, makes its image a bad sample.

    Raises:
        CoderError: a missing file, folder or column, a file that is no table, or no usable row.
    """
    root = picture_folder(spec, image_root) if image_root is not None and pictures else None
    separator = None if csv_separator is None else csv_separator.replace("\\t", "\t")  # a shell passes two characters
    if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
        raise CoderError(f"--csv-separator is {csv_separator!r}; it must be one character, not a quote or the end of a line")
    images: dict[str, _Rows] = {}
    lines = read_lines(spec)
    if separator is None:
        separator = detect_separator(next(iter(lines), ""), (csv_img_key, csv_caption_key))
        if separator not in "\t,":
            log.info("%s: its columns are separated by %r (another: --csv-separator)", spec, separator)
    rows = read_rows(lines, separator, csv_img_key, name=spec)
    _, columns = next(rows, (0, []))
    needed = {"--csv-img-key": ("pictures", csv_img_key), "--csv-caption-key": ("captions", csv_caption_key)}
    if negatives_key not in (None, NEGATIVES):
        needed["--csv-negatives-key"] = "hard negatives", str(negatives_key)
    _check_columns(spec, columns, separator, needed)
    check_metadata(spec, metadata, columns)
    for number, row in rows:
        cells = dict(zip(columns, row, strict=False))
        path = cells.get(csv_img_key, "")
        key = path if path.strip() else f"line {number}"
        image = images.setdefault(key, _Rows({name: cells.get(name) for name in metadata}))
        try:
            if len(row) != len(columns):
                raise BadSample("caption", f"it has {len(row)} columns, and the header {len(columns)} columns")
            if key != path:
                raise BadSample("file", f"it has no image in column {csv_img_key!r}")
            image.captions += check_captions((cells[csv_caption_key],))
            if negatives_key in cells and cells[negatives_key].strip():
                image.negatives |= dict.fromkeys(check_negatives(_json_list(cells[negatives_key])))
        except BadSample as fault:
            image.fault = BadSample(fault.kind, f"line {number}: {fault}")
    folders = (*(() if root is None else (root,)), Path(), Path(spec).resolve().parent)
    items = []
    for path, image in images.items():
        names = other_names(Path(path).stem)
        if image.fault is not None:
            items.append(bad_item(path, image.fault, names))
            continue
        captions, negatives = tuple(image.captions), tuple(image.negatives)
        picture = picture_of(path, *(folders if pictures else (None,)))
        items.append(Item(path, captions, names=names, negatives=negatives, metadata=image.metadata, **picture))
    return ItemSource(items, name=spec, columns=columns)


def _check_columns(spec: str, columns: Sequence[str], separator: str, needed: dict[str, tuple[str, str]]) -> None:
    absent = [f"{column!r} for the {kind} ({flag})" for flag, (kind, column) in needed.items() if column not in columns]
    if not absent:
        return
    if longest := max((len(name) for name in columns if len(name) > 1000), default=0):
        raise CoderError(
            f"{spec}: no table of captions: its first line has a field of {longest:,} characters, as files of region features "
            "have, which are named by --regions"
        )
    raise CoderError(
        f"{spec}: no column {' and '.join(absent)}; its columns, separated by {separator!r} (--csv-separator), are: "
        f"{shorten(', '.join(map(repr, columns))) or 'none: its first line is empty'}"
    )


def check_metadata(spec: str, metadata: Sequence[str], columns: Sequence[str]) -> None:
    """Raise a ``CoderError`` if a table lacks a column that is to be kept."""
    if missing := [name for name in metadata if name not in columns]:
        raise CoderError(f"{spec}: no column {missing[0]!r} (--columns); its columns are: {', '.join(map(repr, columns))}")


def _json_list(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadSample("caption", f'its negatives are not a JSON list of texts, such as ["a red dog"]: {error}') from None


def detect_separator(header: str, columns: Sequence[str]) -> str:
    """The character that separates the columns of a table: tab, comma, semicolon or bar.

    Args:
        header: the first line.
        columns: those that are needed; the separator between which most of them are found is taken, else the one that makes
            most columns.

    Example:
        >>> detect_separator("filepath,title", ("filepath", "title"))
        ','
        >>> detect_separator('"image; file"\\tcaption', ("filepath", "title"))
        '\\t'
    """

    def fit(separator: str) -> tuple[int, int]:
        _, present = next(read_rows([header], separator, ""), (0, []))
        return sum(column in present for column in columns), len(present)

    return max(_SEPARATORS, key=fit)  # of equals the first: open_clip's tab


def open_karpathy(
    spec: str,
    *,
    split: str = "train",
    image_root: str | None = None,
    pictures: bool = True,
    metadata: Sequence[str] = (),
) -> ItemSource:
    """The reader ``karpathy``: one split of a ``dataset_*.json`` of Flickr8k, Flickr30K or COCO.

    Args:
        spec: the file.
        split: ``train``, which includes COCO's ``restval``, ``val`` or ``test``.
        image_root: default: ``images`` in the file's folder, else that folder. COCO's ``filepath`` is relative to it.
        pictures, metadata: as in :func:`~coder_plugin.data.open_source`.

    An image's key is its path, its other names ``cocoid``, ``imgid`` and the file name; captions are named by ``sentid``. An
    image without a file name or with faulty captions is a bad sample.

    Raises:
        CoderError: another format, a missing folder or split, or no usable image.
    """
    beside = Path(spec).parent / "images"
    default = beside if beside.is_dir() else beside.parent
    root = picture_folder(spec, image_root or default) if pictures else None
    content = read_json(spec)
    entries = content.get("images") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CoderError(f"{spec}: not in Karpathy's format: no list 'images' of objects")
    splits = {split, "restval"} if split == "train" else {split}
    items = [_item(root, number, entry, metadata) for number, entry in enumerate(entries) if entry.get("split") in splits]
    if not items:
        present = ", ".join(sorted({str(entry.get("split")) for entry in entries})) or "none"
        raise CoderError(f"{spec}: no images in split {split!r}; splits present: {present}")
    refuse(spec, [repr(key) for key in duplicates(item.key for item in items)], "files of two or more images")
    return ItemSource(items, name=f"{spec} ({split})")


def _item(root: Path | None, number: int, entry: dict[str, Any], metadata: Sequence[str]) -> Item:
    name, folder, sentences = entry.get("filename"), entry.get("filepath") or "", entry.get("sentences", [])
    names = other_names(entry.get("cocoid"), entry.get("imgid"), name)
    fault = None
    if not isinstance(name, str) or not name:
        fault = BadSample("file", f"images[{number}] has no 'filename'")
    elif not isinstance(folder, str):
        fault = BadSample("file", f"images[{number}] has a 'filepath' that is not text")
    elif not isinstance(sentences, list) or not all(isinstance(each, dict) and "raw" in each for each in sentences):
        fault = BadSample("caption", "'sentences' is not a list of objects with 'raw'")
    key = os.path.join(folder, name) if isinstance(folder, str) and isinstance(name, str) and name else f"images[{number}]"
    if fault is not None:
        return bad_item(key, fault, names)
    captions = tuple(each["raw"] for each in sentences)
    sentids = other_names(*(each.get("sentid") for each in sentences))
    kept = {name: entry.get(name) for name in metadata}
    return Item(key, captions, names=names, caption_names=sentids, metadata=kept, **picture_of(key, root))


def _refuse_url() -> NoReturn:
    raise BadSample(
        "file",
        "a URL, and the pictures of a table are local files: nothing is fetched. Download them first, for example with "
        "img2dataset, and train on its shards",
    )


def read_json(spec: str | Path) -> Any:
    return files.read_json(spec, most=_MOST_BYTES)


def picture_folder(spec: str, folder: str | Path) -> Path:
    if not Path(folder).is_dir():
        raise CoderError(f"{spec}: image folder {str(folder)!r} does not exist")
    return Path(folder)


def picture_of(key: str, *folders: Path | None) -> dict[str, Any]:
    """``load`` and ``paths`` of the :class:`Item` whose picture is ``key`` in the first folder that has it; None: it has none.

    Files are looked for only when they are loaded: looking for 100,000 first takes minutes on a network drive.
    """
    if folders[0] is None:
        return {"load": partial(no_picture, key)}
    if _URL.match(key):
        return {"load": _refuse_url}
    paths = tuple(str(folder / key) for folder in folders if folder is not None)
    return {"load": partial(_load, paths), "paths": paths}


def _load(paths: Sequence[str]) -> Image:
    return decode_image(next(filter(os.path.exists, paths), paths[0]))


def no_picture(key: str) -> NoReturn:
    raise BadSample("file", f"no picture: {key!r} was opened for its captions only")


def other_names(*names: object) -> tuple[str | None, ...]:
    """Numbers and texts as text, None for anything else, so that each position is one kind of name (:class:`Item`)."""
    return tuple(str(name) if is_name(name) else None for name in names)


def is_name(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool) and value != ""


def duplicates(values: Iterable[Hashable]) -> list[Hashable]:
    """The values that occur more than once, each once."""
    return [value for value, count in Counter(values).items() if count > 1]


def refuse(spec: str | Path, faults: Sequence[str], what: str) -> None:
    """Raise a ``CoderError`` with the number of faults and the first one, if there are any."""
    if faults:
        raise CoderError(f"{spec}: {what}: {len(faults)}, the first: {shorten(faults[0])}")
