"""Read data sets of Hugging Face's ``datasets``: from the hub, from a folder, or an object in Python; whole or as a stream.

No code of a data set is run: ``datasets`` from version 4 on refuses those that are scripts. Pictures are not decoded by it but
by :func:`~coder_plugin.data.decode.decode_image`, with its limits.
"""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version
from PIL.Image import Image

from coder_plugin.data.bad_samples import BadSample, shorten
from coder_plugin.data.decode import decode_image, from_picture
from coder_plugin.data.item import Item, bad_item
from coder_plugin.data.source import ItemSource, Source, check_captions, check_negatives
from coder_plugin.data.streams import StreamSource
from coder_plugin.data.tables import check_metadata, no_picture, other_names
from coder_plugin.data.tars import LARGEST_FILE
from coder_plugin.errors import CoderError, did_you_mean, install_command
from coder_plugin.hub_access import hub_access

#: OWNER/NAME of the hub, then a configuration, a revision and a split, where they are given.
_HUB = re.compile(r"(?P<path>[\w.-]+/[\w.-]+)(/(?P<name>[\w.-]+))?(@(?P<revision>[\w./-]+))?(:(?P<split>[\w.-]+))?")
#: What data sets call the split for validation.
_VALIDATION = ("validation", "val", "valid", "dev")
#: A picture that a streamed folder of the hub names instead of holding it.
_ON_HUB = re.compile(r"(zip://[^:]*::)?hf://datasets/[^:]*")
_ROWS = 1000  # of captions, read at once
_IMAGES = ("image", "img", "picture", "jpg", "jpeg", "png", "webp")
_CAPTIONS = ("captions", "caption", "sentences", "text", "title", "txt")
_KEYS = ("key", "image_id", "img_id", "filename", "file_name", "__key__")
_NUMBERED = re.compile(r"captions?_?\d+")


def open_hf(
    spec: Any,
    *,
    split: str = "train",
    image_column: str | None = None,
    caption_column: Sequence[str] | None = None,
    key_column: str | None = None,
    negatives_key: str | None = None,
    pictures: bool = True,
    streaming: bool = False,
    metadata: Sequence[str] = (),
) -> Source:
    """The reader ``hf``: a data set of Hugging Face's ``datasets``, one row an image.

    Args:
        spec: ``hf:OWNER/NAME`` of the hub, with ``/CONFIGURATION``, ``@REVISION`` and ``:SPLIT`` behind it where they are
            needed; a folder that ``save_to_disk`` has written, or one of Parquet, Arrow or JSON files or of pictures with a
            ``metadata.csv`` or ``metadata.jsonl``; Parquet files (a pattern); or a ``Dataset`` or ``IterableDataset``.
        split: ``train``; any other is looked for by its name, ``val`` also as ``validation``, ``valid`` and ``dev``. What has
            one split alone and is on this machine is that split.
        image_column: the pictures [the column of type ``Image``, else ``image``, ``jpg``, ``png`` ...].
        caption_column: the captions: a column of texts or of lists of texts, or several of them [``captions``, ``caption``,
            ``sentences``, ``text``, ``title``, ``txt``, or ``caption_0``, ``caption_1`` ...].
        key_column: names of the images, numbers or texts; rows of one name are one image's captions, but in a stream they stay
            samples of their own with one id [``key``, ``image_id``, ``img_id``, ``filename``, ``file_name``, ``__key__``; else
            the number of the row is the name].
        negatives_key, pictures, metadata: as in :func:`~coder_plugin.data.open_source`.
        streaming: read shards in order as they are needed, instead of any row at any time.

    Raises:
        CoderError: ``datasets`` is not installed; a data set, split or column that does not exist, or that would run code.
    """
    name = spec if isinstance(spec, str) else f"{type(spec).__name__} ({split})"
    dataset, count = load(spec, split, streaming=streaming) if isinstance(spec, str) else (spec, None)
    if isinstance(dataset, Mapping):
        raise CoderError(f"{name}: give one of its splits, such as dataset[{next(iter(dataset), split)!r}]")
    dataset = undecoded(dataset, name)
    features: Mapping[str, Any] = dataset.features or next(iter(dataset.take(1)), {})
    check_metadata(name, metadata, list(features))
    columns = _find_columns(features, image_column, caption_column or (), key_column, negatives_key, pictures, name)
    if hasattr(dataset, "__len__"):
        return ItemSource(DatasetItems(dataset, columns, split=split, metadata=metadata), name=name)
    _check_version(name, "5.1", "a stream of older ones would lose samples when a run is resumed; or read the data set whole")
    make_item = partial(_make_item, columns=columns, split=split, metadata=metadata)
    return StreamSource(dataset, make_item, name=name, num_images=count)


@wraps(open_hf, assigned=())
def open_hf_stream(spec: str, **options: Any) -> Source:
    """The reader ``hf-streaming``: as :func:`open_hf`, with ``streaming=True``; of the hub ``hf-streaming:OWNER/NAME``."""
    return open_hf(spec, **{**options, "streaming": True})


def is_dataset(data: Any) -> bool:
    """Whether ``data`` is an object of Hugging Face's ``datasets``, which need not be installed."""
    return any(cls.__module__.partition(".")[0] == "datasets" for cls in type(data).__mro__)


def _check_version(name: str, least: str, why: str) -> None:
    import datasets

    if Version(datasets.__version__) < Version(least):
        raise CoderError(
            f"{name}: datasets {datasets.__version__} is installed, {least} or later is needed ({why}): pip install -U datasets"
        )


class _Columns(NamedTuple):
    """Names of columns; None of those that are not read. Without a key the rows' numbers name the images."""

    image: str | None
    captions: Sequence[str]
    key: str | None
    negatives: str | None


def _find_columns(
    features: Mapping[str, Any], image: str | None, captions: Sequence[str], key: str | None, negatives: str | None,
    pictures: bool, name: str,
) -> _Columns:  # fmt: skip
    """The columns that are named, else the first that is called as usual, by the columns' types or a row."""
    columns = list(features)
    listed = f"; its columns are: {', '.join(map(repr, columns)) or 'none'}"

    def first(names: Iterable[str], columns: Sequence[str] = columns) -> str | None:
        return next((each for each in names if each in columns), None)

    for flag, names in (("--image-column", [image]), ("--caption-column", captions), ("--key-column", [key])):
        for each in names:
            if each and each not in columns:
                raise CoderError(f"{name}: no column {each!r} ({flag}){did_you_mean(each, columns)}{listed}")
    if pictures and image is None:
        typed = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
        image = first(_IMAGES, typed) or (typed[0] if len(typed) == 1 else first(_IMAGES))
        if image is None:
            reason = f"several columns of pictures: {', '.join(typed)}" if typed else "no column of pictures"
            raise CoderError(f"{name}: {reason}: name one (--image-column){listed}")
    if not captions:
        numbered = sorted(filter(_NUMBERED.fullmatch, columns), key=lambda column: (len(column), column))
        captions = [usual] if (usual := first(_CAPTIONS)) else numbered
        if not captions:
            raise CoderError(f"{name}: no column of captions: name one or several (--caption-column){listed}")
    return _Columns(image if pictures else None, captions, key or first(_KEYS), negatives if negatives in columns else None)


def load(spec: str, split: str, *, streaming: bool) -> tuple[Any, int | None]:
    """The ``Dataset`` or ``IterableDataset`` of a name, and the number of its rows where its description has it."""
    try:
        import datasets
    except ImportError as error:
        raise CoderError(f"{spec}: this needs datasets: {install_command('datasets')}") from error
    _check_version(spec, "4", "older ones run code of data sets")
    location = re.sub(r"^hf(-streaming)?:", "", spec)
    from_hub = location != spec
    try:
        if from_hub:
            with hub_access():
                return _from_hub(datasets, location, split, streaming)
        return _from_disk(datasets, location, split, streaming), None
    except CoderError as error:
        raise CoderError(f"{spec}: {error}") from error
    except Exception as error:  # of many kinds: of the hub, of Arrow, of each builder
        raise CoderError(f"{spec}: {_reason(error)}") from error


def _from_hub(datasets: Any, location: str, split: str, streaming: bool) -> tuple[Any, int | None]:
    if os.path.exists(location):
        raise CoderError(f"this is a path on this machine: leave out 'hf:' (--train-data {location})")
    if (match := _HUB.fullmatch(location)) is None:
        raise CoderError("write hf:OWNER/NAME, or hf:OWNER/NAME/CONFIGURATION@REVISION:SPLIT with the parts that are needed")
    which = {name: match[name] for name in ("path", "name", "revision")}
    chosen = match["split"]
    if chosen is None:
        splits = datasets.get_dataset_split_names(which["path"], which["name"], revision=which["revision"])
        chosen = _choose(splits, split, how="name it: hf:OWNER/NAME:SPLIT")
    dataset = datasets.load_dataset(**which, split=chosen, streaming=streaming)
    described = (dataset.info.splits or {}).get(chosen)
    return dataset, None if described is None else described.num_examples or None


def _from_disk(datasets: Any, location: str, split: str, streaming: bool) -> Any:
    saved = any(os.path.exists(os.path.join(location, name)) for name in ("state.json", "dataset_dict.json"))
    if saved:
        dataset = datasets.load_from_disk(location)
    elif os.path.isdir(location):
        dataset = datasets.load_dataset(location, streaming=streaming)
    else:
        files = sorted(glob.glob(location))
        if not files:
            raise CoderError("no such file")
        kind = {".arrow": "arrow", ".jsonl": "json", ".json": "json"}.get(Path(files[0]).suffix, "parquet")
        dataset = datasets.load_dataset(kind, data_files=files, streaming=streaming)
    if isinstance(dataset, Mapping):
        how = "give one of them, as a folder or as files"
        dataset = dataset[next(iter(dataset)) if len(dataset) == 1 else _choose(list(dataset), split, how=how)]
    if saved and streaming:
        dataset = dataset.to_iterable_dataset(num_shards=max(1, len(dataset.cache_files)))
    return dataset


def _choose(splits: Sequence[str], split: str, *, how: str) -> str:
    names = [name for name in (split, *(_VALIDATION if split == "val" else ())) if name in splits]
    if not names:
        raise CoderError(f"it has no split {split!r}; its splits are {', '.join(splits) or 'none'}: {how}")
    return names[0]


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "scripts are no longer supported" in text:
        return f"{text}: code of a data set is not run; use a copy of it in Parquet, such as @refs/convert/parquet of the hub"
    if "Config name is missing" in text:
        text += " (hf:OWNER/NAME/CONFIGURATION)"
    return text if len(text) < 600 else f"{text[:600]}…"


def undecoded(dataset: Any, name: str) -> Any:
    """The data set without a format, its pictures as files; ``CoderError`` if it has a transform of its own."""
    import datasets

    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        raise CoderError(f"{name}: its own transform would not be used: pass dataset.with_format(None); trainers augment")
    dataset = dataset.with_format(None)
    for column, feature in (dataset.features or {}).items():
        if isinstance(feature, datasets.Image) and feature.decode:
            dataset = dataset.cast_column(column, datasets.Image(decode=False))
    return dataset


def _make_item(row: Mapping[str, Any], number: str, *, columns: _Columns, split: str, metadata: Sequence[str]) -> Item:
    """The item of a row of a stream."""
    load = None if columns.image is None else partial(open_picture, row[columns.image])
    return _item([row], columns, f"{split}/{number}", metadata, load)


def _item(
    rows: Sequence[Mapping[str, Any]],
    columns: _Columns,
    number: str,
    metadata: Sequence[str],
    load: Callable[[], Image] | None,
) -> Item:
    """The item of the rows of one image, of which the first names it; ``number`` names it if it has no key."""
    name = None if columns.key is None else rows[0][columns.key]
    key, names = (number, ()) if name in (None, "") else (str(name), other_names(Path(str(name)).stem))
    captions: list[Any] = []
    for value in (row[column] for row in rows for column in columns.captions):
        captions += value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    lists = [row[columns.negatives] or () for row in rows] if columns.negatives is not None else []
    try:
        negatives = tuple(text for each in lists for text in check_negatives(each))
        kept = {name: rows[0][name] for name in metadata}
        load = partial(no_picture, key) if load is None else load
        return Item(key, check_captions(captions), load, names, negatives=negatives, metadata=kept)
    except BadSample as fault:
        return bad_item(key, fault.with_traceback(None), names)


class DatasetItems(Sequence[Item]):
    """The images of a ``Dataset``, made as they are asked for: neither captions nor pictures are kept in memory."""

    def __init__(self, dataset: Any, columns: _Columns, *, split: str, metadata: Sequence[str] = ()) -> None:
        self._columns, self._split, self._metadata = columns, split, tuple(metadata)
        others = [column for column in (columns.key, columns.negatives, *metadata) if column is not None]
        self._texts = dataset.select_columns(list(dict.fromkeys([*columns.captions, *others])))
        self._pictures = None if columns.image is None else dataset.select_columns([columns.image])
        self._groups = self._group()  # the rows of each image, if several rows have one key

    def __len__(self) -> int:
        return len(self._texts) if self._groups is None else len(self._groups)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        numbers = [range(len(self._texts))[index]] if self._groups is None else self._groups[index]
        return self._make(numbers, [self._texts[number] for number in numbers])

    def __iter__(self) -> Iterator[Item]:
        if self._groups is None:
            return (self._make([number], [row]) for number, row in enumerate(self._rows()))
        return (self[number] for number in range(len(self)))

    def _rows(self) -> Iterator[dict[str, Any]]:
        """The texts of all rows, many at once, which is much faster than one by one."""
        for batch in self._texts.iter(batch_size=_ROWS):
            yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))

    def _make(self, numbers: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> Item:
        load = None if self._pictures is None else partial(self._load, numbers[0])
        return _item(rows, self._columns, f"{self._split}/{numbers[0]}", self._metadata, load)

    def _load(self, number: int) -> Image:
        assert self._pictures is not None
        return open_picture(self._pictures[number][self._columns.image])

    def _group(self) -> list[list[int]] | None:
        if self._columns.key is None:
            return None
        groups = defaultdict(list)
        for number, row in enumerate(self._rows()):
            key = row[self._columns.key]
            groups[f"{self._split}/{number}" if key in (None, "") else str(key)].append(number)
        return None if len(groups) == len(self._texts) else list(groups.values())


def open_picture(value: Any) -> Image:
    """The RGB picture of a row.

    Args:
        value: ``{"bytes", "path"}`` as ``datasets`` stores pictures, the content of a file, its path, or a picture.

    Raises:
        BadSample: none of these, or a picture that :func:`~coder_plugin.data.decode.decode_image` refuses.
        OSError: no such file, no regular file, or one that may not be read.
    """
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, Image):
        return from_picture(value)
    if isinstance(value, str) and "://" in value:
        value = _fetch(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return decode_image(bytes(value))
    if isinstance(value, str) and value:
        return decode_image(value)
    raise BadSample("file", "the row has no picture" if not value else f"no picture but a {type(value).__name__}")


def _fetch(address: str) -> bytes:
    """The content of a file of a data set on the hub. Addresses of other places are refused: rows are others' words."""
    if not _ON_HUB.fullmatch(address):
        raise BadSample("file", f"an address instead of a picture, which is not fetched: {shorten(address)}")
    import fsspec

    with fsspec.open(address, "rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise BadSample("file", f"a file of over {LARGEST_FILE >> 20} MiB")
    return data
