"""What upstream's data sets give besides image and text: the image's id, a positive caption, the words' classes.

Upstream's readers stay as they are, with their shuffling, resampling and sharding; the few places where a sample is still
known by its key and its raw caption are replaced while the pipelines are built. 3.3's trainer unpacks ``images, texts`` and
no more, so there everything travels as further rows of the texts, [B, n + 1, L] (:func:`pack`); main has dicts.

Every class here can be pickled, as data loading workers that are not forked need.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import random
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from open_clip_train import data as upstream
from torch import Tensor
from webdataset.tariterators import tar_file_expander, url_opener

from coder_plugin.concepts.tags import Tags
from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.hard_negatives import NEGATIVES, HardNegatives
from coder_plugin.data.item import UNKNOWN_IMAGE, Item, stable_hash
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.shard_lists import shard_labels
from coder_plugin.data.source import check_negatives
from coder_plugin.data.table_rows import describe_bytes
from coder_plugin.data.tables import detect_separator
from coder_plugin.errors import CoderError
from coder_plugin.integrations.open_clip.overrides import Shadow, overridden
from coder_plugin.noise.positives import Positives

log = logging.getLogger(__name__)
#: A list of captions in a shard's ``json``, which replaces its ``txt`` (coder_plugin.data.shards).
CAPTIONS = "captions"


@dataclass(frozen=True)
class Extras:
    """Makes of a caption and its image's key the keyword arguments that the model's forward takes besides image and text.

    ``positives``, ``tags`` and ``negatives`` are None where no head reads them. ``captions``: of several captions of an image
    in a shard, ``draw`` one at random, or take ``all``, each as a pair. ``negatives_key``: the column of a table that has hard
    negatives. They are drawn by ``seed`` and ``epoch``, a :class:`SharedEpoch` of upstream's, which loading processes share.
    """

    tokenizer: Any
    positives: Positives | None = None
    tags: Tags | None = None
    captions: str = "draw"
    negatives: HardNegatives | None = None
    negatives_key: str = NEGATIVES
    seed: int = 0
    epoch: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """What training batches have besides ``image_id``, in the order of packing."""
        named = {"text_positive": self.positives, "text_tags": self.tags, "text_negatives": self.negatives}
        return tuple(name for name, made in named.items() if made is not None)

    def __call__(
        self, key: object, caption: str | None, others: tuple[str, ...] = (), negatives: tuple[str, ...] = ()
    ) -> dict[str, Tensor]:
        """``image_id`` int64 [], ``text_positive`` and ``text_tags`` int64 [L], ``text_negatives`` [n, L] and their images' ids
        [n]."""
        made = {"image_id": torch.tensor(stable_hash(key))}
        if caption is not None and self.positives is not None:
            text, _ = self.positives(caption, others)
            made["text_positive"] = self.tokenizer([text])[0]
        if caption is not None and self.tags is not None:
            _, tags = self.tags([caption], self.tokenizer)
            made["text_tags"] = tags[0]
            self.tags.take()
        if caption is not None and self.negatives is not None:
            item = Item(str(key), (caption,), _no_picture, others=others, negatives=negatives)
            drawn = self.negatives.draw(item, seed=self.seed, epoch=self.epoch.get_value())
            made["text_negatives"] = self.tokenizer([text for text, _ in drawn])
            made["text_negative_ids"] = torch.tensor([image for _, image in drawn])
        return made


def _no_picture() -> Any:
    raise AssertionError("upstream loads pictures")


#: Of the names, the one that has several rows.
_SEVERAL = "text_negatives"


def pack(text: Tensor, extras: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensor:
    """Tokens [L] and further rows -> [n + 1, L] int64: the text, ``names`` in order, and a row that the image's id begins.
    Hard negatives are several rows, and the ids of their images follow that of the image."""
    last = torch.zeros_like(text)
    last[0] = extras["image_id"]
    rows = [extras[name] for name in names if name != _SEVERAL]
    if _SEVERAL in names:
        rows += extras[_SEVERAL].unbind()
        last[1 : 1 + len(extras[_SEVERAL])] = extras["text_negative_ids"]
    return torch.stack([text, *rows, last])


def unpack(text: Tensor, names: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Packed texts [B, n + 1, L] -> texts [B, L] and the rest by name. Evaluation packs the id alone."""
    rows = text.unbind(1)
    further: dict[str, Tensor] = {}
    if len(rows) > 2:
        single = [name for name in names if name != _SEVERAL]
        further = dict(zip(single, rows[1 : 1 + len(single)], strict=True))
        if _SEVERAL in names:
            further[_SEVERAL] = text[:, 1 + len(single) : -1]
            further["text_negative_ids"] = rows[-1][:, 1 : 1 + further[_SEVERAL].shape[1]]
        else:
            assert len(rows) == 2 + len(single)
    return rows[0], {**further, "image_id": rows[-1][:, 0]}


def unpacked(names: tuple[str, ...], _module: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """A forward hook, before: packed texts as their first rows, for a model that knows no others."""
    image, *further = inputs
    if further and further[0].ndim == 3:
        further[0], _ = unpack(further[0], names)
    return (image, *further), keywords


class Csv(upstream.CsvDataset):
    """Upstream's, one pair a line; pairs of one file have one id."""

    images: Any  # a list in 3.3, a Series in main

    def __init__(self, *args: Any, extras: Extras, packed: tuple[str, ...] | None, is_train: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.extras, self.packed, self.is_train = extras, packed, is_train
        self.keys = self.images
        self._find_images(Path(args[0] if args else options["input_filename"]))
        self.lines: dict[str, list[int]] = {}
        if is_train and extras.negatives is not None:
            self._read_negatives(args[0] if args else options["input_filename"], options.get("sep"))
        if is_train and (extras.positives is not None or extras.negatives is not None):
            lines = defaultdict(list)
            for line, path in enumerate(self.keys):
                lines[str(path)].append(line)
            self.lines = dict(lines)

    def __getitem__(self, index: int) -> Any:
        path, caption = str(_at(self.keys, index)), str(_at(self.captions, index))
        others = tuple(str(_at(self.captions, line)) for line in self.lines.get(path, ()) if line != index)
        return _with(super().__getitem__(index), self.extras(path, caption if self.is_train else None, others), self.packed)


    def _read_negatives(self, csv: str, separator: Any) -> None:
        """Add those of the column to those of the table, for each image those of all of its lines.

        Raises:
            CoderError: no such column, unless it is the default one; a faulty list, which names the line.
        """
        negatives, key = self.extras.negatives, self.extras.negatives_key
        assert negatives is not None
        there = list(upstream.pd.read_csv(csv, sep=separator, nrows=0))
        table = {name: list(listed) for name, listed in negatives.table.items()}
        if key not in there and key != NEGATIVES:
            raise CoderError(f"{csv}: no column {key!r} for the hard negatives (--csv-negatives-key)")
        cells = upstream.pd.read_csv(csv, sep=separator, usecols=[key], dtype=str)[key] if key in there else ()
        for number, (path, cell) in enumerate(zip(self.keys, cells, strict=False)):
            if isinstance(cell, str) and cell.strip():
                try:
                    texts = check_negatives(parse_json(cell))
                except (BadSample, ValueError) as error:
                    raise CoderError(f"{csv}: row {number + 1} after the header: its {key!r}: {error}") from error
                table.setdefault(str(path), []).extend((text, UNKNOWN_IMAGE) for text in texts)
        paths = set(map(str, self.keys))
        if not any(name in paths for name in table):
            raise CoderError(
                f"{csv}: no image has a hard negative: give --negatives-file FILE, or a list of texts in a column "
                "(--csv-negatives-key)"
            )
        self.extras = replace(self.extras, negatives=replace(negatives, table=table))

    def _find_images(self, csv: Path) -> None:
        """Relative paths are of the working directory, as upstream has it, else of the CSV's folder, as in our own reader.

        Raises:
            CoderError: the first picture is in neither.
        """
        first = Path(str(_at(self.images, 0))) if len(self.images) else None
        if first is None or first.is_file():
            return
        if first.is_absolute() or not (csv.parent / first).is_file():
            here = "" if first.is_absolute() else f" in the working directory, {Path.cwd()}, or beside the file"
            raise CoderError(f"{csv}: its first picture, {first}, is not there{here}: --csv-img-key names the column of paths")
        # a Series stays one: workers share its memory
        join = partial(os.path.join, str(csv.parent))
        self.images = self.images.map(join) if hasattr(self.images, "map") else list(map(join, self.images))


class Synthetic(upstream.SyntheticDataset):
    """Upstream's, one image and one caption over and over; each counts as an image of its own."""

    def __init__(self, *args: Any, extras: Extras, packed: tuple[str, ...] | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.extras, self.packed = extras, packed

    def __getitem__(self, index: int) -> Any:
        return _with(super().__getitem__(index), self.extras(index, self.caption), self.packed)


def _at(column: Any, index: int) -> Any:
    return column.iloc[index] if hasattr(column, "iloc") else column[index]


def _with(sample: Any, extras: dict[str, Tensor], packed: tuple[str, ...] | None) -> Any:
    if packed is None:
        return {**sample, **extras}
    image, text = sample
    return image, pack(text, extras, packed)


class Rename:
    """In place of ``webdataset.rename``: image, caption and extras of each sample of a shard.

    Where ``json`` has a list ``captions``, one of them is drawn in training (or each is a pair); evaluation has them all, as
    pairs of one image. ``labels``: what each shard is called in keys.
    """

    def __init__(
        self,
        image: str,
        text: str,
        keep: bool = True,
        *,
        extras: Extras,
        is_train: bool,
        labels: Mapping[str, str],
        json_text: JsonText | None = None,
    ) -> None:
        self.image, self.text, self.keep = image.split(";"), text.split(";"), keep
        self.extras, self.is_train, self.labels, self.json_text = extras, is_train, labels, json_text

    def __call__(self, samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        read = filled = 0
        for sample in samples:
            image = next((sample[field] for field in self.image if field in sample), None)
            meta = read_json(sample)
            captions = self.captions(sample, meta)
            if image is None or not captions:
                continue
            key = self.key(sample, meta)
            negatives: tuple[str, ...] = ()
            if self.is_train and self.extras.negatives is not None:
                try:
                    negatives = check_negatives(meta.get(NEGATIVES) or ())
                except BadSample as fault:
                    log.warning("skipped sample %r: %s", key, fault)
                    continue
                read, filled = read + 1, filled + bool(negatives or self.extras.negatives.table.get(key))
                if read == 1000 and not filled:
                    log.warning("none of the first 1,000 samples has a hard negative")
            rest = sample if self.keep else {}
            chosen: Any = range(len(captions))
            if self.is_train and self.extras.captions == "draw" and len(captions) > 1:
                chosen = [random.randrange(len(captions))]
            for number in chosen:
                caption, others = captions[number], tuple(captions[:number] + captions[number + 1 :])
                made = self.extras(key, caption if self.is_train else None, others, negatives)
                text = caption if self.json_text is None else self.json_text.again(caption)
                yield {**rest, "image": image, "text": text, **made}

    def captions(self, sample: Mapping[str, Any], meta: Mapping[str, Any]) -> list[str]:
        if self.json_text is not None:
            return [caption] if (caption := self.json_text(meta)) else []
        if listed := captions_in(meta):
            return listed
        text = next((sample[field] for field in self.text if field in sample), None)
        return [] if text is None else [text.decode("utf-8", "replace") if isinstance(text, bytes) else text]

    def key(self, sample: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
        """What names an image in shards, as coder_plugin.data.shards has it: ``image_id`` of its json, or shard and key."""
        if meta.get("image_id") is not None:
            return str(meta["image_id"])
        return f"{self.labels[sample['__url__']]}/{sample['__key__']}"


class JsonText:
    """Main's ``--json-text-key``: a caption of the json field, found here, and in a json of its own for upstream to find."""

    def __init__(self, key: str, weights: Any) -> None:
        self.field = key.split(";")[0].strip()
        self.extract = upstream.JsonCaptionExtractor(key, sample_probs=weights)

    def __call__(self, meta: Mapping[str, Any]) -> str:
        return self.extract(meta)

    def again(self, caption: str) -> str:
        return json.dumps({self.field: caption})


class HasCaptions:
    """In place of what upstream selects samples by: one that has its captions in ``json`` alone stays as well."""

    def __init__(self, selected: Any) -> None:
        self.selected = selected

    def __call__(self, sample: Mapping[str, Any]) -> bool:
        return self.selected(sample) or bool(captions_in(read_json(sample)))


def read_json(sample: Mapping[str, Any]) -> dict[str, Any]:
    meta = sample.get("json")
    if isinstance(meta, (bytes, str)):
        try:
            meta = json.loads(meta)
        except ValueError:
            meta = None
    return meta if isinstance(meta, dict) else {}


def captions_in(meta: Mapping[str, Any]) -> list[str]:
    """The list ``captions`` of a json field, or its one caption; none where there is none with text."""
    captions = meta.get(CAPTIONS)
    listed = [captions] if isinstance(captions, str) else captions
    return [each for each in listed if isinstance(each, str) and each.strip()] if isinstance(listed, list) else []


class Pack:
    """In place of ``webdataset.to_tuple("image", "text")``: the pair, with the text's further rows."""

    def __init__(self, *fields: str, names: tuple[str, ...]) -> None:
        assert fields == ("image", "text")
        self.names = names

    def __call__(self, samples: Iterator[dict[str, Any]]) -> Iterator[tuple[Any, Tensor]]:
        for sample in samples:
            yield sample["image"], pack(sample["text"], sample, self.names)


@contextlib.contextmanager
def reading(extras: Extras, *, packed: bool) -> Iterator[None]:
    """Upstream's data sets with ``extras`` while they are built: packed into the texts (3.3) or as keys of a dict (main)."""

    def rows(is_train: bool) -> tuple[str, ...] | None:
        return (extras.names if is_train else ()) if packed else None

    def shards(build: Any, args: Any, preprocess: Any, is_train: bool, **options: Any) -> Any:
        weights = args.train_data_upsampling_factors if is_train else None
        urls, _ = upstream.expand_urls(args.train_data if is_train else args.val_data, weights)
        key = getattr(args, "json_text_key", None)
        json_text = JsonText(key, getattr(args, "json_text_key_probs", None)) if key else None
        named: dict[str, Any] = {"extras": extras, "is_train": is_train, "labels": shard_labels(urls), "json_text": json_text}
        stages: dict[str, Any] = {"rename": partial(Rename, **named)}
        if json_text is None:
            stages["select"] = partial(_select, upstream.wds.select)
        if (names := rows(is_train)) is not None:
            stages["to_tuple"] = partial(Pack, names=names)
        with overridden(upstream, {"wds": Shadow(upstream.wds, **stages)}):
            return build(args, preprocess, is_train, **options)

    def table(build: Any, args: Any, preprocess: Any, is_train: bool, **options: Any) -> Any:
        dataset = partial(Csv, extras=extras, packed=rows(is_train), is_train=is_train)
        with overridden(upstream, {"CsvDataset": dataset}):
            return build(args, preprocess, is_train, **options)

    synthetic = partial(Synthetic, extras=extras, packed=rows(True))
    names = {
        "get_wds_dataset": partial(shards, upstream.get_wds_dataset),
        "get_csv_dataset": partial(table, upstream.get_csv_dataset),
        "SyntheticDataset": synthetic,
    }
    with overridden(upstream, names):
        yield


def _select(select: Any, predicate: Any) -> Any:
    return select(HasCaptions(predicate))


#: webdataset 0.2.86, which open_clip 3.3 asks for, has no mark; 1.0 puts one at the end of a shard.
_NO_MARK = {"eof_value": None} if "eof_value" in inspect.signature(tar_file_expander).parameters else {}


def read_tars(src: Any, handler: Any = upstream.log_and_continue) -> Iterator[dict[str, Any]]:
    """Upstream's way from shards to samples, without the marks that its grouping takes for files. It is replaced as a whole:
    workers that are not forked import upstream's modules as they are."""
    files = tar_file_expander(url_opener(src, handler=handler), handler=handler, **_NO_MARK)
    return upstream.group_by_keys_nothrow(files, handler=handler)


def samples_of(args: Any) -> int:
    """How many pairs upstream takes an epoch to have, before any data set is built; 0 where nothing is trained.

    Raises:
        CoderError: a table that cannot be read or lacks a column; shards without a size.
    """
    kind = args.dataset_type
    if not args.train_data:
        return (args.train_num_samples or 0) if kind == "synthetic" else 0
    if kind == "csv" or (kind == "auto" and args.train_data.rsplit(".", 1)[-1] in ("csv", "tsv")):
        return _rows(args)
    found = args.train_num_samples or (upstream.get_dataset_size(args.train_data)[0] if kind in ("auto", "webdataset") else 0)
    if not found and args.train_data == "scenes":
        raise CoderError(
            "--train-data scenes: coder-plugin train reads the built-in scenes, and open_clip's trainer shards and tables: "
            "name one of yours, or try it with --dataset-type synthetic --train-num-samples 640"
        )
    if not found:
        raise CoderError(f"how many samples {args.train_data} has is unknown: give --train-num-samples, or a sizes.json beside")
    return found


def _rows(args: Any) -> int:
    columns = {"--csv-img-key": args.csv_img_key, "--csv-caption-key": args.csv_caption_key}
    try:
        table = upstream.pd.read_csv(args.train_data, sep=args.csv_separator, usecols=lambda name: name in columns.values())
    except UnicodeDecodeError as error:
        raise CoderError(f"--train-data {args.train_data}: {describe_bytes(args.train_data)}") from error
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise CoderError(f"--train-data {args.train_data} cannot be read as a table: {error}") from error
    for flag, column in columns.items():
        if column not in table:
            there = ", ".join(map(repr, upstream.pd.read_csv(args.train_data, sep=args.csv_separator, nrows=0)))
            header = args.csv_separator.join(upstream.pd.read_csv(args.train_data, sep=args.csv_separator, nrows=0))
            found = detect_separator(header, tuple(columns.values()))
            hint = f"; give --csv-separator {shlex.quote(found)}" if found not in (args.csv_separator, "\t") else ""
            split = f"split at {args.csv_separator!r}: {there}{hint}"
            raise CoderError(f"{args.train_data}: no column {column!r} ({flag}); {split}")
    return len(table)
