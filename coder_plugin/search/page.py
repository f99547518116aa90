"""Search results, mined negatives and near-duplicates as an HTML page in one file, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from coder_plugin.html import data_uri, jpeg_uri, render
from coder_plugin.search.duplicates import Group
from coder_plugin.search.index import Index
from coder_plugin.search.mine import Mined
from coder_plugin.search.records import SHOWN, link, place
from coder_plugin.search.searcher import Hit
from coder_plugin.terminal import plural

#: Captions of an image that a page shows, at most; groups of near-duplicates, and images of each.
_CAPTIONS, _GROUPS, _MEMBERS = 10, 100, 24


def results_page(index: Index, results: Sequence[tuple[str, Any, Sequence[Hit]]]) -> str:
    """A page of queries and their hits, which link the pictures' files.

    Args:
        index: the index that was searched.
        results: for each query its name, its picture (PIL; None for a text) and its hits.
    """
    from PIL.Image import Image

    boxes: list[dict[str, Any]] = []
    for name, picture, hits in results:
        pictures = not hits or hits[0].text is None
        cards = [
            _card(
                index, hit.image.row if pictures else None, place(hit.image), text=hit.caption, rank=rank, link=link(hit.image),
                score=f"{hit.score:.3f}" if hit.fused is None else f"{hit.fused:.3f} (shortlist {hit.score:.3f})",
            )  # fmt: skip
            for rank, hit in enumerate(hits, 1)
        ]
        boxes.append({"title": name, "pictures": pictures, "cards": cards, "note": "" if hits else "No results."})
        if isinstance(picture, Image):
            boxes[-1]["picture"] = data_uri(picture, 288)
    return _page(index, "Search of", boxes, contents=True)


def negatives_page(index: Index, mined: Sequence[Mined]) -> str:
    """A page of images with their captions and their negatives, of :meth:`~coder_plugin.search.mine.Miner.mine`."""
    boxes = []
    for each in mined:
        captions = index.records.captions_of(each.image.row, limit=_CAPTIONS, characters=SHOWN)
        boxes.append({
            "title": each.image.key,
            "picture": _thumbnail(index, each.image.row),
            "texts": [*captions, f"positive {each.score:.3f}: {each.positive.text[:SHOWN]}"],
            "pictures": True,
            "cards": [
                _card(
                    index, one.caption.image, one.key, text=one.caption.text, rank=one.rank,
                    score=f"{one.score:.3f}, similarity {one.similarity:.3f}",
                )
                for one in each.negatives
            ],
            "note": "" if each.negatives else "no caption passes",
        })  # fmt: skip
    intro = (
        "Each box is an image with its captions, and below them its negatives: captions of other images that the model takes "
        "for its own, each with the image that it belongs to. A negative that is right for the image is a false one."
    )
    return _page(index, "Hard negatives from", boxes, intro=[intro])


def duplicates_page(index: Index, groups: Sequence[Group], summary: str) -> str:
    """A page of the first 100 groups of near-duplicates, and of 24 images of each, below a ``summary`` of all of them."""
    boxes = []
    for group in groups[:_GROUPS]:
        images = index.records.images(group.rows[:_MEMBERS].tolist())
        more = len(group.rows) - len(images)
        cards = [
            _card(index, image.row, image.key, score=f"{similarity:.4f}", kept=not number)
            for number, (image, similarity) in enumerate(zip(images, group.similarities.tolist(), strict=False))
        ]
        note = f"and {more} more" if more else ""
        boxes.append({"title": f"{len(group.rows):,} images", "pictures": True, "cards": cards, "note": note})
    intro = (
        "Each box is a group of pictures whose vectors have a high cosine. The first, in a frame, is the one to keep; the "
        "number below each other is its cosine with the first."
    )
    more = len(groups) - _GROUPS
    rest = f"and {more} more groups, which --json prints" if more > 0 else ""
    return _page(index, "Near-duplicates in", boxes, intro=[summary, intro], more=rest)


def _page(index: Index, title: str, boxes: Sequence[dict[str, Any]], **values: Any) -> str:
    model = index.note["model"]
    heading = {
        "name": index.folder.resolve().name,
        "sizes": f"{plural(index.size('images'), 'image')}, {plural(index.size('captions'), 'caption')}",
        "model": PurePath(model.get("name", "")).name,  # a page may be passed on: it shows no folders
        "objective": model.get("objective", ""),
    }
    return render("cards.html", title=title, boxes=boxes, **{"intro": (), "contents": False, "more": "", **heading, **values})


def _card(
    index: Index, row: int | None, name: str, *, score: str, text: str = "", rank: int | str = "", link: str | None = None,
    kept: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """An image; ``row`` is None where its thumbnail is not shown."""
    picture = None if row is None else _thumbnail(index, row)
    return {"picture": picture, "name": name, "score": score, "text": text[:SHOWN], "rank": rank, "link": link, "kept": kept}


def _thumbnail(index: Index, row: int) -> str | None:
    file = index.records.thumbnail(row)
    return None if file is None else jpeg_uri(file)
