"""Which columns of a data set hold pictures, captions and keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coder_plugin.errors import CoderError, did_you_mean

_IMAGES = ("image", "img", "picture", "jpg", "jpeg", "png", "webp")
_CAPTIONS = ("captions", "caption", "sentences", "text", "title", "txt")
_KEYS = ("key", "image_id", "img_id", "filename", "file_name", "__key__")
_NUMBERED = re.compile(r"captions?_?\d+")


@dataclass(frozen=True)
class Columns:
    """Names of columns; None of those that are not read. Without a key the rows' numbers name the images."""

    image: str | None
    captions: tuple[str, ...]
    key: str | None
    negatives: str | None = None


def find_columns(
    features: Mapping[str, Any],
    *,
    image: str | None = None,
    captions: Sequence[str] | None = None,
    key: str | None = None,
    negatives: str | None = None,
    pictures: bool = True,
    name: str = "data",
) -> Columns:
    """The columns of pictures, captions and keys: those that are named, else the first that is called as usual.

    Args:
        features: the columns' types, or a row.
        image, captions, key: names of columns; None: not given.
        negatives: that of hard negatives, which the data may lack; None: they are not read.
        pictures: whether pictures are read.
        name: of the data, for the ``CoderError`` where a column does not exist or cannot be told.

    Example:
        >>> find_columns({"jpg": None, "txt": None, "__key__": None})
        Columns(image='jpg', captions=('txt',), key='__key__', negatives=None)
        >>> find_columns({"image": None, "caption_0": None, "caption_1": None}).captions
        ('caption_0', 'caption_1')
    """
    columns = list(features)
    listed = f"; its columns are: {', '.join(map(repr, columns)) or 'none'}"
    for flag, names in (("--image-column", [image]), ("--caption-column", captions or []), ("--key-column", [key])):
        for each in names:
            if each and each not in columns:
                raise CoderError(f"{name}: no column {each!r} ({flag}){did_you_mean(each, columns)}{listed}")
    if pictures and image is None:
        typed = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
        image = _first(_IMAGES, typed) or (typed[0] if len(typed) == 1 else _first(_IMAGES, columns))
        if image is None:
            reason = f"several columns of pictures: {', '.join(typed)}" if typed else "no column of pictures"
            raise CoderError(f"{name}: {reason}: name one (--image-column){listed}")
    if not captions:
        usual = _first(_CAPTIONS, columns)
        numbered = sorted(filter(_NUMBERED.fullmatch, columns), key=lambda column: (len(column), column))
        captions = [usual] if usual else numbered
        if not captions:
            raise CoderError(f"{name}: no column of captions: name one or several (--caption-column){listed}")
    has_negatives = negatives if negatives in columns else None
    return Columns(image if pictures else None, tuple(captions), key or _first(_KEYS, columns), has_negatives)


def _first(names: Iterable[str], columns: Sequence[str]) -> str | None:
    return next((each for each in names if each in columns), None)
