"""Search results, mined negatives and near-duplicates as an HTML page in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from coder_plugin.html import data_uri, jpeg_uri, render
from coder_plugin.search.duplicates import Group
from coder_plugin.search.index import Index
from coder_plugin.search.miner import Mined
from coder_plugin.search.records import SHOWN, link, place
from coder_plugin.search.searcher import Hit
from coder_plugin.terminal import plural

#: Captions of an image that a page shows, at most.
_CAPTIONS = 10
#: Groups of near-duplicates that a page shows, and images of each, at most.
_GROUPS, _MEMBERS = 100, 24


def results_page(index: Index, results: Sequence[tuple[str, Any, Sequence[Hit]]]) -> str:
    """A page of queries and their hits, which link the pictures' files; it loads nothing from elsewhere.

    Args:
        index: the index that was searched.
        results: for each query its name, its picture (PIL; None for a text) and its hits.

    Returns:
        HTML.
    """
    from PIL.Image import Image

    queries = [
        {
            "name": name,
            "picture": data_uri(picture, 288) if isinstance(picture, Image) else None,
            "texts": bool(hits) and hits[0].text is not None,
            "hits": [_hit(index, hit) for hit in hits],
        }
        for name, picture, hits in results
    ]
    return render("search.html", queries=queries, **_heading(index))


def negatives_page(index: Index, mined: Sequence[Mined]) -> str:
    """A page of images with their captions and their negatives; it loads nothing from elsewhere.

    Args:
        index: the index that they were mined from.
        mined: of :meth:`~coder_plugin.search.miner.Miner.mine`.

    Returns:
        HTML.
    """
    records = index.records
    images = [
        {
            "key": each.image.key,
            "picture": _picture(index, each.image.row),
            "captions": records.captions_of(each.image.row, limit=_CAPTIONS, characters=SHOWN),
            "positive": each.positive.text[:SHOWN],
            "score": f"{each.score:.3f}",
            "negatives": [
                {
                    "key": negative.key,
                    "picture": _picture(index, negative.caption.image),
                    "text": negative.caption.text[:SHOWN],
                    "score": f"{negative.score:.3f}",
                    "similarity": f"{negative.similarity:.3f}",
                    "rank": negative.rank,
                }
                for negative in each.negatives
            ],
        }
        for each in mined
    ]
    return render("negatives.html", images=images, **_heading(index))


def duplicates_page(index: Index, groups: Sequence[Group], summary: str) -> str:
    """A page of near-duplicates; it loads nothing from elsewhere.

    Args:
        index: the index that they were found in.
        groups: of :func:`~coder_plugin.search.duplicates.find_duplicates`; the first 100 are shown, and 24 images of each.
        summary: a sentence about all of them.

    Returns:
        HTML.
    """
    shown = [
        {
            "size": f"{len(group.rows):,}",
            "more": max(0, len(group.rows) - _MEMBERS),
            "images": [
                {"key": image.key, "picture": _picture(index, image.row), "similarity": f"{similarity:.4f}"}
                for image, similarity in zip(
                    index.records.images(group.rows[:_MEMBERS].tolist()), group.similarities.tolist(), strict=False
                )
            ],
        }
        for group in groups[:_GROUPS]
    ]
    more = max(0, len(groups) - _GROUPS)
    return render("duplicates.html", groups=shown, more=more, summary=summary, **_heading(index))


def _heading(index: Index) -> dict[str, str]:
    model = index.note["model"]
    return {
        "name": index.folder.resolve().name,
        "sizes": f"{plural(index.size('images'), 'image')}, {plural(index.size('captions'), 'caption')}",
        "model": PurePath(model.get("name", "")).name,  # a page may be passed on: it shows no folders
        "objective": model.get("objective", ""),
    }


def _picture(index: Index, row: int) -> str | None:
    file = index.records.thumbnail(row)
    return None if file is None else jpeg_uri(file)


def _hit(index: Index, hit: Hit) -> dict[str, Any]:
    return {
        "place": place(hit.image),
        "link": link(hit.image),
        "caption": hit.caption[:SHOWN],
        "score": f"{hit.score:.3f}" if hit.fused is None else f"{hit.fused:.3f} (shortlist {hit.score:.3f})",
        "picture": _picture(index, hit.image.row) if hit.text is None else None,
    }
