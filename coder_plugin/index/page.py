"""A search's results as a page of one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from coder_plugin.html import data_uri, jpeg_uri, render
from coder_plugin.index.index import Index
from coder_plugin.index.search import Hit


def results_page(index: Index, found: Sequence[tuple[str, Any, Sequence[Hit]]]) -> str:
    """HTML of queries and what they have found; nothing is loaded from elsewhere.

    Args:
        index: that was searched. found: of each query its name, the picture that it was (PIL; else None) and its hits.
    """
    from PIL.Image import Image

    made = index.manifest
    queries = [
        {
            "name": name,
            "picture": data_uri(shown, 288) if isinstance(shown, Image) else None,
            "texts": bool(hits) and hits[0].text is not None,
            "hits": [_shown(index, hit) for hit in hits],
        }
        for name, shown, hits in found
    ]
    return render(
        "search.html",
        name=index.folder.resolve().name,
        sizes=f"{made['images']:,} images, {made['captions']:,} captions",
        model=PurePath(made["model"].get("name", "")).name,  # a page may be passed on, and folders are nobody's business
        objective=made["model"].get("objective", ""),
        queries=queries,
    )


def _shown(index: Index, hit: Hit) -> dict[str, Any]:
    small = index.records.thumbnail(hit.image.row) if hit.text is None else None
    score = f"{hit.score:.3f}" if hit.fused is None else f"{hit.fused:.3f} (first stage {hit.score:.3f})"
    return {
        "key": hit.image.key,
        "caption": hit.text if hit.text is not None else next(iter(index.records.captions_of(hit.image.row)), ""),
        "score": score,
        "picture": None if small is None else jpeg_uri(small),
    }
