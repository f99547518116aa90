"""Images of the data as small pictures, and examples with them, ready for a page."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from coder_plugin.data.item import Item
from coder_plugin.html import data_uri
from coder_plugin.pretrained.encode import Encoded
from coder_plugin.report.attention import load_picture
from coder_plugin.report.examples import Example, Hit


def items_of(source: Any, encoded: Encoded, rows: Collection[int]) -> dict[int, Item]:
    """By row of ``encoded.images``, of these rows their items, in order; the data are read no further than the last of them.

    Several images may have one key, and so one id: rows are found in the data's order, in which images that could not be read
    are left out, by id and captions.
    """
    captions: list[list[str]] = [[] for _ in encoded.image_ids]
    for caption, row in zip(encoded.captions, encoded.image_of_text.tolist(), strict=True):
        captions[row].append(caption)
    expected = zip(encoded.image_ids.tolist(), captions, strict=True)
    found: dict[int, Item] = {}
    row, last, wanted = 0, max(rows, default=-1), next(expected, None)
    for _, item in source.items():
        if row > last or wanted is None:
            break
        if (item.image_id, list(item.captions)) == wanted:
            if row in rows:
                found[row] = item
            row, wanted = row + 1, next(expected, None)
    return found


def beside_of(source: Any, keys: Collection[str]) -> dict[str, Item]:
    """By key, items of a second source of the same images, such as their pictures beside regions; None: nothing."""
    found: dict[str, Item] = {}
    for _, item in source.items() if source is not None else ():
        if item.key in keys:
            found.setdefault(item.key, item)
            if len(found) == len(keys):
                break
    return found


def small(item: Item | None) -> str | None:
    """A data URI of an item's picture, or None: it cannot be read, or is read as regions."""
    picture = load_picture(item)
    return None if picture is None else data_uri(picture)


def shown(
    encoded: Encoded, source: Any, beside: Any, examples: Mapping[str, tuple[list[Example], list[Example]]]
) -> list[dict[str, Any]]:
    """The best and the worst of each direction (``t2i``, ``i2t``), in blocks with a title and queries.

    A query has ``image`` (of :func:`_image`'s kind) or ``caption``, ``rank`` (1-based), ``hits``, each with ``image`` or
    ``caption``, ``score``, ``right``, ``behind``, and ``truth``, where it is not among the hits.
    """
    wanted: set[int] = set()
    for way, sides in examples.items():
        for each in (example for side in sides for example in side):
            wanted.update([each.query] if way == "i2t" else [hit.index for hit in (*each.hits, each.truth)])
    items = items_of(source, encoded, wanted)
    pictures = beside_of(beside, {item.key for item in items.values()})
    made = {index: _image(index, items.get(index), pictures) for index in sorted(wanted)}

    def hit(way: str, each: Hit) -> dict[str, Any]:
        what = {"caption": encoded.captions[each.index]} if way == "i2t" else {"image": made[each.index]}
        return {**what, "score": each.score, "right": each.right, "behind": each.behind}

    def query(way: str, each: Example) -> dict[str, Any]:
        what = {"image": made[each.query]} if way == "i2t" else {"caption": encoded.captions[each.query]}
        truth = None if any(found.right for found in each.hits) else hit(way, each.truth)
        return {**what, "rank": each.rank + 1, "hits": [hit(way, found) for found in each.hits], "truth": truth}

    titles = {"t2i": "Text to image", "i2t": "Image to text"}
    return [
        {"way": way, "title": f"{titles[way]}, {which}", "queries": [query(way, each) for each in side]}
        for way, sides in examples.items()
        for which, side in zip(("best", "worst"), sides, strict=True)
        if side
    ]


def _image(index: int, item: Item | None, beside: Mapping[str, Item]) -> dict[str, Any]:
    """An image's ``uri`` (None: no picture), its ``key``, and its first caption, which says what it shows."""
    if item is None:
        return {"uri": None, "key": f"image {index}", "alt": ""}
    return {"uri": small(beside.get(item.key, item)), "key": item.key, "alt": item.captions[0]}
