"""Search results as an HTML page in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from coder_plugin.html import data_uri, jpeg_uri, render
from coder_plugin.index.search import Hit, Index


def results_page(index: Index, results: Sequence[tuple[str, Any, Sequence[Hit]]]) -> str:
    """A page of queries and their hits; it loads nothing from elsewhere.

    Args:
        index: the index that was searched.
        results: for each query its name, its picture (PIL; None for a text) and its hits.

    Returns:
        HTML.
    """
    from PIL.Image import Image

    manifest = index.manifest
    queries = [
        {
            "name": name,
            "picture": data_uri(picture, 288) if isinstance(picture, Image) else None,
            "texts": bool(hits) and hits[0].text is not None,
            "hits": [_hit(index, hit) for hit in hits],
        }
        for name, picture, hits in results
    ]
    return render(
        "search.html",
        name=index.folder.resolve().name,
        sizes=f"{manifest['images']:,} images, {manifest['captions']:,} captions",
        model=PurePath(manifest["model"].get("name", "")).name,  # a page may be passed on: it shows no folders
        objective=manifest["model"].get("objective", ""),
        queries=queries,
    )


def _hit(index: Index, hit: Hit) -> dict[str, Any]:
    file = index.records.thumbnail(hit.image.row) if hit.text is None else None
    return {
        "key": hit.image.key,
        "caption": hit.text if hit.text is not None else next(iter(index.records.captions_of(hit.image.row)), ""),
        "score": f"{hit.score:.3f}" if hit.fused is None else f"{hit.fused:.3f} (first stage {hit.score:.3f})",
        "picture": None if file is None else jpeg_uri(file),
    }
