"""Read tables of image files and captions: CSV files as in open_clip, and Karpathy's split files."""

from __future__ import annotations

import csv
import logging
import os
import shlex
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from PIL.Image import Image

from coder_plugin import files
from coder_plugin.data.bad_samples import BadSample, shorten
from coder_plugin.data.decode import check_max_pixels, decode_image
from coder_plugin.data.hard_negatives import NEGATIVES
from coder_plugin.data.item import Item, bad_item
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.source import ItemSource, check_captions, check_negatives
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular

log = logging.getLogger(__name__)

#: What may separate the columns of a table, open_clip's default first.
_SEPARATORS = "\t,;|"
#: Most bytes of a JSON file of captions.
_MOST_BYTES = 1 << 31


def open_csv(
    spec: str,
    *,
    split: str = "train",
    csv_separator: str | None = None,
    csv_img_key: str = "filepath",
    csv_caption_key: str = "title",
    csv_negatives_key: str | None = None,
    images: str | None = None,
    pictures: bool = True,
    max_pixels: int | None = None,
    metadata: Sequence[str] = (),
) -> ItemSource:
    """The reader ``csv``: a table with a header and one row a caption. Rows with the same file are one image's captions.

    Args:
        spec: the table.
        split: not used, since a table holds one split.
        csv_separator: one character; None: the tab, comma, semicolon or bar that separates the named columns in the header.
        csv_img_key, csv_caption_key: names of the columns.
        csv_negatives_key: column of the image's hard negatives, a JSON list of texts or nothing; an image has those of all of
            its rows. A table may lack the column ``negatives``. None: hard negatives are not read.
        images: folder that the paths are relative to. Without it, and for paths that it does not have, the working directory
            (as in open_clip), else the table's folder.
        pictures: False if only the captions are needed, for features from other files.
        max_pixels: as in :func:`~coder_plugin.data.decode.decode_image`.
        metadata: further columns whose values an item keeps, those of its first row.

    An image's key is its path, its other name the file name without ending. A row of another length, without an image or with
    an empty caption, or with faulty hard negatives, makes its image a bad sample.

    Raises:
        CoderError: a missing file, folder or column, a file that is no table, or no usable row.
    """
    check_max_pixels(max_pixels)
    root = picture_folder(spec, images) if images is not None and pictures else None
    separator = None if csv_separator is None else csv_separator.replace("\\t", "\t")  # a shell passes two characters
    if separator is not None and len(separator) != 1:
        raise CoderError(f"--csv-separator is {csv_separator!r}; it must be one character")
    captions: dict[str, list[str]] = {}
    negatives: dict[str, dict[str, None]] = {}
    faults: dict[str, BadSample] = {}
    kept: dict[str, dict[str, Any]] = {}
    try:
        with open_regular(spec, newline="", encoding="utf-8-sig") as file:
            if separator is None:
                separator = detect_separator(file.readline(1 << 20), (csv_img_key, csv_caption_key))
                file.seek(0)
                if separator != "\t":
                    _note_separator(spec, separator)
            rows = csv.DictReader(file, delimiter=separator)
            present = list(rows.fieldnames or ())
            columns = {"--csv-img-key": ("pictures", csv_img_key), "--csv-caption-key": ("captions", csv_caption_key)}
            if csv_negatives_key is not None and csv_negatives_key != NEGATIVES:
                columns["--csv-negatives-key"] = "hard negatives", csv_negatives_key
            absent = {flag: named for flag, named in columns.items() if named[1] not in present}
            if absent:
                what = " and ".join(f"{column!r} for the {kind} ({flag})" for flag, (kind, column) in absent.items())
                raise CoderError(
                    f"{spec}: no column {what}; its columns, separated by {separator!r} (--csv-separator), are: "
                    f"{', '.join(map(repr, present)) or 'none: its first line is empty'}"
                )
            check_metadata(spec, metadata, present)
            for row in rows:
                line = f"line {rows.line_num}"
                path = (row[csv_img_key] or "").strip() and row[csv_img_key]
                captions.setdefault(path or line, []).append(row[csv_caption_key])
                if metadata and path not in kept:
                    kept[path] = {name: row[name] for name in metadata}
                if None in row or None in row.values():
                    faults[path or line] = BadSample("caption", f"{line} does not have {len(present)} columns")
                elif not path:
                    faults[line] = BadSample("file", f"{line} has no image in column {csv_img_key!r}")
                else:
                    try:
                        check_captions((row[csv_caption_key],))
                        if csv_negatives_key in present and row[csv_negatives_key].strip():
                            listed = check_negatives(_json_list(row[csv_negatives_key]))
                            negatives.setdefault(path, {}).update(dict.fromkeys(listed))
                    except BadSample as fault:
                        faults[path] = BadSample(fault.kind, f"{line}: {fault}")
    except FileNotFoundError as exc:
        raise CoderError(f"{spec}: no such file") from exc
    except UnicodeDecodeError as exc:
        raise CoderError(f"{spec}: {describe_bytes(spec)}") from exc
    except (OSError, csv.Error) as exc:
        hint = " (give files of region features with --regions)" if "field larger" in str(exc) else ""
        raise CoderError(f"{spec}: cannot be read as a table: {_reason(exc)}{hint}") from exc
    folder = Path(spec).resolve().parent
    items = []
    for path, texts in captions.items():
        if path in faults:
            items.append(bad_item(path, faults[path], other_names(Path(path).stem)))
            continue
        load = partial(_load, path, folder, root, max_pixels) if pictures else partial(no_picture, path)
        own = tuple(negatives.get(path, ()))
        names, paths = other_names(Path(path).stem), (path, str(folder / path)) if pictures else ()
        items.append(Item(path, tuple(texts), load, names, negatives=own, paths=paths, metadata=kept.get(path, {})))
    return ItemSource(items, name=spec, columns=present)


def check_metadata(spec: str, metadata: Sequence[str], columns: Sequence[str]) -> None:
    """Check that a table has the columns that are to be kept.

    Raises:
        CoderError: it lacks one; names those that it has.
    """
    if missing := [name for name in metadata if name not in columns]:
        raise CoderError(f"{spec}: no column {missing[0]!r} (--columns); its columns are: {', '.join(map(repr, columns))}")


def _json_list(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadSample("negative", f'its negatives are not a JSON list of texts, such as ["a red dog"]: {error}') from None


_noted: set[str] = set()


def _note_separator(spec: str, separator: str) -> None:
    """Log a separator that was detected, once for all tables that have it: a command opens several, and some twice."""
    if separator not in _noted:
        _noted.add(separator)
        log.info("%s: its columns are separated by %r (another: --csv-separator)", spec, separator)


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
        present = next(csv.reader([header], delimiter=separator), [])
        return sum(column in present for column in columns), len(present)

    return max(_SEPARATORS, key=fit)  # of equals the first: open_clip's tab


def describe_bytes(spec: str) -> str:
    """Where a file stops being UTF-8, and how to convert it."""
    number, line, start = 1, b"", 0
    with open_regular(spec, "rb") as file:
        for line in file:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                start = error.start
                break
            number += 1
    encoding = "utf-16" if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
    output = shlex.quote(str(Path(spec).with_suffix(f".utf8{Path(spec).suffix}")))
    return (
        f"line {number}, byte {start + 1} (0x{line[start : start + 1].hex()}) is not UTF-8: convert the file, for example from "
        f"{encoding} with: iconv -f {encoding} -t utf-8 {shlex.quote(spec)} > {output}"
    )


def open_karpathy(
    spec: str,
    *,
    split: str = "train",
    images: str | None = None,
    restval: bool = True,
    pictures: bool = True,
    max_pixels: int | None = None,
    metadata: Sequence[str] = (),
) -> ItemSource:
    """The reader ``karpathy``: one split of a ``dataset_*.json`` of Flickr8k, Flickr30K or COCO.

    Args:
        spec: the file.
        split: ``train``, ``val`` or ``test``.
        images: folder of the pictures (default: ``images`` in the file's folder, else that folder); COCO's ``filepath`` is
            relative to it.
        restval: whether ``train`` includes COCO's split ``restval``, as usual.
        pictures: False if only the captions are needed, for features from other files.
        max_pixels: as in :func:`~coder_plugin.data.decode.decode_image`.
        metadata: further fields of an image whose values an item keeps; one may lack them.

    An image's key is its path, its other names ``cocoid``, ``imgid`` and the file name; captions are named by ``sentid``. An
    image without a file name or with faulty captions is a bad sample.

    Raises:
        CoderError: another format, a missing folder or split, or no usable image.
    """
    check_max_pixels(max_pixels)
    root = picture_folder(spec, images or _image_folder(Path(spec))) if pictures else None
    splits = {split, "restval"} if split == "train" and restval else {split}
    entries = _entries(spec)
    chosen = [(number, entry) for number, entry in enumerate(entries) if entry.get("split") in splits]
    if not chosen:
        present = ", ".join(sorted({str(entry.get("split")) for entry in entries})) or "none"
        raise CoderError(f"{spec}: no images in split {split!r}; splits present: {present}")
    items = [_item(root, number, entry, max_pixels, metadata) for number, entry in chosen]
    refuse(spec, [repr(key) for key in duplicates(item.key for item in items)], "files of two or more images")
    return ItemSource(items, name=f"{spec} ({split})")


def _entries(spec: str) -> list[dict[str, Any]]:
    content = read_json(spec)
    entries = content.get("images") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CoderError(f"{spec}: not in Karpathy's format: no list 'images' of objects")
    return entries


def _item(
    root: Path | None, number: int, entry: dict[str, Any], max_pixels: int | None, metadata: Sequence[str]
) -> Item:
    name, folder, sentences = entry.get("filename"), entry.get("filepath") or "", entry.get("sentences", [])
    key = os.path.join(folder, name) if isinstance(name, str) and name and isinstance(folder, str) else f"images[{number}]"
    names = other_names(entry.get("cocoid"), entry.get("imgid"), name)
    try:
        if not isinstance(name, str) or not name:
            raise BadSample("file", f"images[{number}] has no 'filename'")
        if not isinstance(folder, str):
            raise BadSample("file", f"images[{number}] has a 'filepath' that is not text")
        if not isinstance(sentences, list) or not all(isinstance(each, dict) and "raw" in each for each in sentences):
            raise BadSample("caption", "'sentences' is not a list of objects with 'raw'")
        captions = check_captions([each["raw"] for each in sentences])
    except BadSample as fault:
        return bad_item(key, fault.with_traceback(None), names)
    sentids = other_names(*(each.get("sentid") for each in sentences))
    kept = {name: entry.get(name) for name in metadata}
    load = loader(root, key, max_pixels)
    return Item(key, captions, load, names, caption_names=sentids, paths=picture_paths(root, key), metadata=kept)


def _image_folder(spec: Path) -> Path:
    folder = spec.parent / "images"
    return folder if folder.is_dir() else spec.parent


def _load(path: str, folder: Path, root: Path | None, max_pixels: int | None) -> Image:
    """Check the path only when loading: checking 100,000 files first takes minutes on a network drive."""
    places = [Path(path), folder / path] if root is None else [root / path, Path(path), folder / path]
    return decode_image(str(next(filter(os.path.exists, places), (root or folder) / path)), max_pixels=max_pixels)


def read_json(spec: str | Path) -> Any:
    return files.read_json(spec, most=_MOST_BYTES)


def picture_folder(spec: str, folder: str | Path) -> Path:
    if not Path(folder).is_dir():
        raise CoderError(f"{spec}: image folder {str(folder)!r} does not exist")
    return Path(folder)


def loader(root: Path | None, key: str, max_pixels: int | None = None) -> Callable[[], Image]:
    """A function that decodes the picture ``key`` in ``root``, or raises ``ValueError`` if there is no folder."""
    return partial(no_picture, key) if root is None else partial(decode_image, str(root / key), max_pixels=max_pixels)


def picture_paths(root: Path | None, key: str) -> tuple[str, ...]:
    """Where the picture ``key`` in ``root`` is, as of :class:`~coder_plugin.data.item.Item`."""
    return () if root is None else (str(root / key),)


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


def _reason(exc: Exception) -> str:
    return exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
