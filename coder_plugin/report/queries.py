"""Queries with their results as the report's pages show them, and the data's items that they need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from PIL import Image

from coder_plugin.data.item import Item
from coder_plugin.html import data_uri
from coder_plugin.pretrained.encode import Encoded
from coder_plugin.report.examples import Example, Hit


def describe_queries(
    encoded: Encoded, source: Any, pictures: Any, queries: Mapping[str, tuple[list[Example], list[Example]]]
) -> list[dict[str, Any]]:
    """Blocks for the template, each with a ``title`` and ``queries``.

    A query has ``image`` (see :func:`_image`) or ``caption``, ``rank`` (1-based), ``hits``, each with ``image`` or ``caption``,
    ``score``, ``right`` and ``behind``, and ``truth``, the best right candidate if no hit is right.
    """
    rows: set[int] = set()
    for way, sides in queries.items():
        for example in (each for side in sides for each in side):
            rows.update([example.query] if way == "i2t" else [hit.index for hit in (*example.hits, example.truth)])
    items = items_of(source, encoded, rows)
    under = items_by_key(pictures, {item.key for item in items.values()})
    images = {index: _image(index, items.get(index), under) for index in sorted(rows)}

    def hit(way: str, each: Hit) -> dict[str, Any]:
        candidate = {"caption": encoded.captions[each.index]} if way == "i2t" else {"image": images[each.index]}
        return {**candidate, "score": each.score, "right": each.right, "behind": each.behind}

    def query(way: str, each: Example) -> dict[str, Any]:
        subject = {"image": images[each.query]} if way == "i2t" else {"caption": encoded.captions[each.query]}
        truth = None if any(candidate.right for candidate in each.hits) else hit(way, each.truth)
        return {**subject, "rank": each.rank + 1, "hits": [hit(way, one) for one in each.hits], "truth": truth}

    titles = {"t2i": "Text to image", "i2t": "Image to text"}
    return [
        {"way": way, "title": f"{titles[way]}, {which}", "queries": [query(way, each) for each in side]}
        for way, sides in queries.items()
        for which, side in zip(("best", "worst"), sides, strict=True)
        if side
    ]


def items_of(source: Any, encoded: Encoded, rows: Collection[int]) -> dict[int, Item]:
    """The items of some rows of ``encoded.images``, in order. The data are read no further than the last of them.

    Several images may share a key and so an id, and ``encoded`` lacks images that could not be read: rows are matched in the
    data's order by id and captions.
    """
    captions: list[list[str]] = [[] for _ in encoded.image_ids]
    for caption, row in zip(encoded.captions, encoded.image_of_text.tolist(), strict=True):
        captions[row].append(caption)
    expected = zip(encoded.image_ids.tolist(), captions, strict=True)
    items: dict[int, Item] = {}
    row, last, wanted = 0, max(rows, default=-1), next(expected, None)
    for _, item in source.items():
        if row > last or wanted is None:
            break
        if (item.image_id, list(item.captions)) == wanted:
            if row in rows:
                items[row] = item
            row, wanted = row + 1, next(expected, None)
    return items


def items_by_key(source: Any, keys: Collection[str]) -> dict[str, Item]:
    """The items of a second source of the same images, by key; empty if there is no source."""
    items: dict[str, Item] = {}
    for _, item in source.items() if source is not None else ():
        if item.key in keys:
            items.setdefault(item.key, item)
            if len(items) == len(keys):
                break
    return items


def _image(index: int, item: Item | None, pictures: Mapping[str, Item]) -> dict[str, Any]:
    """An image's ``uri`` (None: no picture), its ``key``, and its first caption as ``alt``."""
    if item is None:
        return {"uri": None, "key": f"image {index}", "alt": ""}
    return {"uri": small_picture(pictures.get(item.key, item)), "key": item.key, "alt": item.captions[0]}


def load_picture(item: Item | None) -> Image.Image | None:
    """An item's picture; None if it cannot be read or is read as regions."""
    if item is None:
        return None
    try:
        loaded = item.load()
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, Image.Image) else None


def small_picture(item: Item | None) -> str | None:
    """A data URI of an item's picture; None if there is none."""
    picture = load_picture(item)
    return None if picture is None else data_uri(picture)
