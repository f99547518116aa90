"""Hard negatives: texts that are wrong for an image, from its data set or from a table of their own, drawn anew each epoch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from coder_plugin.data.bad_samples import shorten
from coder_plugin.data.item import NO_TEXT, UNKNOWN_IMAGE, Item, stable_hash
from coder_plugin.data.source import ItemSource, text_fault
from coder_plugin.data.table_rows import read_lines, read_rows
from coder_plugin.errors import CoderError

#: The key in a shard's json, and the default column of a CSV table.
NEGATIVES = "negatives"
#: The columns of a table of hard negatives, of which the last may be absent.
COLUMNS = ("key", "negative", "negative_key")

#: A text, and the id of the image that it is a caption of, or -1.
Negative = tuple[str, int]


def read_negatives(path: str) -> dict[str, list[Negative]]:
    """Read a table of hard negatives: UTF-8, columns separated by tabs, a header, one row a negative.

    Args:
        path: the file. It is quoted as by Python's ``csv.writer(file, "excel-tab")``. Its columns are ``key``, the image's key
            in the training data; ``negative``, the text; and, where it is known, ``negative_key``, the key of the image that
            the text is a caption of. Other columns are left alone.

    Returns:
        The texts of each key in the file's order, each with the id of its image, or -1.

    Raises:
        CoderError: no such table, no such columns, or a faulty row; names the line.

    Example:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "negatives.tsv")
        ...     with open(path, "w") as file:
        ...         _ = file.write("key\\tnegative\\nred.jpg\\ta blue car\\n")
        ...     read_negatives(path)
        {'red.jpg': [('a blue car', -1)]}
    """
    table: dict[str, list[Negative]] = {}
    rows = read_rows(read_lines(path), "\t", "key", name=path)
    _, present = next(rows, (0, []))
    if absent := [column for column in COLUMNS[:2] if column not in present]:
        raise CoderError(
            f"{path}: no column {' and '.join(map(repr, absent))}; its columns, separated by tabs, are: "
            f"{', '.join(map(repr, present)) or 'none: its first line is empty'}"
        )
    for number, cells in rows:
        row = dict(zip(present, cells, strict=False))
        if fault := _fault(row) if len(cells) == len(present) else f"it does not have {len(present)} columns":
            raise CoderError(f"{path}: line {number}: {fault}")
        of = row.get("negative_key")
        table.setdefault(row["key"], []).append((row["negative"], stable_hash(of) if of else UNKNOWN_IMAGE))
    if not table:
        raise CoderError(f"{path}: it has no row")
    return table


def _fault(row: Mapping[str, str]) -> str:
    if not row["key"]:
        return "it has no image in column 'key'"
    fault = text_fault(row["negative"], "negative")
    return f"it has {fault}" if fault else ""


@dataclass(frozen=True)
class HardNegatives:
    """Draws the hard negatives of training samples.

    Args:
        count: n, how many of each sample, at least 1.
        table: further texts by the image's key, besides those of the items.

    Example:
        >>> item = Item("red.jpg", ("a red car",), lambda: None, negatives=("a blue car", "a red car"))
        >>> HardNegatives(2).draw(item, seed=0, epoch=0)  # the image's own caption is none
        [('a blue car', -1), ('', -2)]
    """

    count: int
    table: Mapping[str, Sequence[Negative]] = field(default_factory=dict)

    def draw(self, item: Item, *, seed: int, epoch: int) -> list[Negative]:
        """``count`` different ones of a sample's, a function of seed, epoch, key and caption; ``("", -2)`` where there are no
        more."""
        drawn = self._of(item)
        rng = random.Random(stable_hash("negatives", seed, epoch, item.key, *item.captions))
        drawn = rng.sample(drawn, min(self.count, len(drawn)))
        return [*drawn, *repeat(("", NO_TEXT), self.count - len(drawn))]

    def _of(self, item: Item) -> list[Negative]:
        """All of an image's, each text once, with an image if any is known. Its own captions are none."""
        listed = zip(item.negatives, item.negative_ids or repeat(UNKNOWN_IMAGE), strict=False)
        own, image_id = {*item.captions, *item.others}, item.image_id
        images: dict[str, int] = {}
        for text, image in (*listed, *self.table.get(item.key, ())):
            if image == image_id:
                own.add(text)
            elif images.get(text, UNKNOWN_IMAGE) == UNKNOWN_IMAGE:
                images[text] = image
        return [(text, image) for text, image in images.items() if text not in own]

    def check(self, source: Any) -> None:
        """Refuse data in memory of which no image has a hard negative. Streams are checked while they are read.

        Raises:
            CoderError: says where hard negatives are looked for.
        """
        captions = getattr(source, "captions", source)  # of images with regions
        if not isinstance(captions, ItemSource) or any(self._of(item) for _, item in captions.items()):
            return
        where = self.where(next(item.key for _, item in captions.items()))
        faulty = (item for _, item in captions.items() if item.fault is not None and "negative" in item.fault.reason)
        if bad := next(faulty, None):
            where += f"; image {shorten(bad.key)!r}: {bad.fault}"
        elif captions.columns and not self.table:
            where += f"; the table's columns are {', '.join(map(repr, captions.columns))}"
        raise CoderError(f"{source.name}: none of {captions.num_images} images has a hard negative: {where}")

    def where(self, key: str) -> str:
        """Why data of which one key is ``key`` may have few hard negatives, for a message."""
        if not self.table:
            return "give --negatives-file FILE, or a list of texts in a CSV column (--csv-negatives-key)"
        first = next(iter(self.table))
        return f"the table names images such as {shorten(first)!r}, the data {shorten(key)!r}"
