"""``coder-plugin index`` and ``coder-plugin search``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError


def index_command(arguments: argparse.Namespace) -> str:
    """Build the index that the flags describe; returns a summary."""
    from coder_plugin import distributed
    from coder_plugin.backbones.base import Backbone
    from coder_plugin.cli.flags import read_options
    from coder_plugin.config import OPENING, READING
    from coder_plugin.data.from_config import make_source, pictures_under_regions
    from coder_plugin.data.pictures import Pictures, is_pictures
    from coder_plugin.index.build import absolute, build_index, model_record
    from coder_plugin.pretrained.build import check_data, first_image
    from coder_plugin.pretrained.open import open_pretrained, saved_data_config

    options = read_options(arguments)
    spec = arguments.run_folder
    if spec is None and "model" not in options:
        raise CoderError("say which model encodes: a run's or export's folder, hf-hub:OWNER/NAME, or --model with --pretrained")
    data = saved_data_config(spec, {**options, "train_data": arguments.data, "val_data": arguments.data})
    if data.dataset_type == "auto" and data.regions is None and is_pictures(arguments.data):
        source, pictures = Pictures(arguments.data), None
    else:
        source, pictures = make_source(data, split=arguments.split), pictures_under_regions(data, arguments.split)
    reading = {"workers": data.workers, "max_bad_images": data.max_bad_images}
    model = open_pretrained(spec, {**reading, **options}, export=arguments.export, name=spec)
    if arguments.what != "captions":
        example = first_image(source, data.max_bad_images, reads_regions=isinstance(model.model, Backbone))
        check_data(model.model, example, source.name, max_regions=model.config.max_regions)
    overrides = {name: options[name] for name in OPENING if name in options}
    manifest = build_index(
        arguments.output,
        model.encoder(),
        source,
        model=model_record(model, spec, export=arguments.export, options=overrides),
        what=arguments.what,
        factory=arguments.factory,
        thumbnails=arguments.thumbnails,
        rerank=arguments.rerank_items,
        pictures=pictures,
        data={
            "data": _absolute_data(arguments.data),
            "split": arguments.split,
            "precision": model.config.precision,
            **{name: absolute(getattr(data, name)) for name in READING},
        },
    )
    if distributed.rank() != 0:
        return ""
    vectors = ", ".join(
        f"{kind}: {each['items']:,}{' x ' + str(each['views']) if each['views'] > 1 else ''} of {each['dimensions']} dimensions"
        for kind, each in manifest["vectors"].items()
    )
    lost = f"; {manifest['unreadable']} images could not be read" if manifest["unreadable"] else ""
    sizes_text = f"{manifest['images']:,} images, {manifest['captions']:,} captions"
    return f"index {arguments.output}: {sizes_text}; vectors of {vectors}{lost}"


def _absolute_data(data: str) -> str:
    """The data's name, the same from whichever working directory; commands and addresses stay as they are."""
    unchanged = data == "scenes" or "::" in data or "://" in data or data.startswith("pipe:")
    return data if unchanged else os.path.abspath(data)


def search_command(arguments: argparse.Namespace) -> str:
    """Search an index; returns what to print, and writes the page that ``--html`` names."""
    from coder_plugin.index.search import open_searcher

    page = None if arguments.html is None else Path(arguments.html)
    if page is not None and not page.parent.is_dir():
        raise CoderError(f"--html {page}: there is no folder {page.parent}")
    searcher = open_searcher(
        arguments.index,
        model=arguments.model_folder,
        verify=arguments.verify,
        parameters=arguments.search_parameters,
        gpu=arguments.gpu,
        need_model=bool(arguments.text or arguments.image),
    )
    results = [
        (name, picture, searcher.search(query, arguments.k, among=arguments.among, rerank=arguments.rerank))
        for name, picture, query in _queries(arguments, searcher)
    ]
    records = searcher.index.records
    if page is not None:
        from coder_plugin.index.page import results_page

        try:
            page.write_text(results_page(searcher.index, results), encoding="utf-8")
        except OSError as error:
            raise CoderError(f"--html {page} cannot be written: {error.strerror or error}") from error
        print(f"page: {page}", file=sys.stderr)
    if arguments.json:
        rows = [
            {"query": name, "results": [_row(rank, hit, records) for rank, hit in enumerate(hits, 1)]}
            for name, _, hits in results
        ]
        return json.dumps(rows, indent=2, ensure_ascii=False)
    lines = []
    for name, _, hits in results:
        lines += [f"{name}:" if len(results) > 1 else "", *_table(hits, records), ""]
    return "\n".join(lines).strip("\n")


def _queries(arguments: argparse.Namespace, searcher: Any) -> list[tuple[str, Any, Any]]:
    """The name, the picture (None for a text) and the query of each query."""
    from coder_plugin.index.records import storable
    from coder_plugin.index.search import load_image

    texts = [storable(text) for value in arguments.text or [] for text in (_read_lines() if value == "-" else [value])]
    queries: list[tuple[str, Any, Any]] = []
    if blank := [text for text in texts if not text.strip()]:
        raise CoderError(f"--text {blank[0]!r}: there is nothing to search for")
    if texts:
        queries += [(text, None, query) for text, query in zip(texts, searcher.text(texts), strict=True)]
    for path in arguments.image or []:
        picture = load_image(path)
        queries += [(storable(path), picture, query) for query in searcher.image([picture])]
    queries += [(storable(key), searcher.index.thumbnail(key), searcher.key(key)) for key in arguments.key or []]
    if not queries:
        raise CoderError("nothing to search for: give --text, --image or --key")
    return queries


def _read_lines() -> list[str]:
    return [line.strip() for line in sys.stdin if line.strip()]


def _row(rank: int, hit: Any, records: Any) -> Mapping[str, Any]:
    row = {"rank": rank, "score": hit.score, "key": hit.image.key, "image_id": hit.image.image_id}
    if hit.fused is not None:
        row["fused"] = hit.fused
    if hit.text is not None:
        return {**row, "text": hit.text}
    return {**row, "captions": list(records.captions_of(hit.image.row))}


def _table(hits: Sequence[Any], records: Any) -> list[str]:
    """The lines of a table; an image is shown with its first caption."""
    fused = any(hit.fused is not None for hit in hits)
    rows = [["", "score", *(["fused"] if fused else []), "image", "caption"]]
    for rank, hit in enumerate(hits, 1):
        caption = hit.text if hit.text is not None else next(iter(records.captions_of(hit.image.row)), "")
        scores = [f"{hit.score:.4f}", *(["" if hit.fused is None else f"{hit.fused:.4f}"] if fused else [])]
        rows.append([str(rank), *scores, hit.image.key, " ".join(caption.split())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.rjust(width) if cell[:1].isdigit() or "score" in cell else cell.ljust(width)
                     for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
