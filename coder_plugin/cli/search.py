"""``coder-plugin search``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coder_plugin.cli.encoding import SearchFlags
from coder_plugin.cli.flags import add_command
from coder_plugin.config import option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo, printable

#: Characters of a caption or key in the table.
_LONGEST = 500


@dataclass(frozen=True, kw_only=True)
class Command(SearchFlags):
    """The flags of ``coder-plugin search``."""

    text: list[str] = option([], "texts; - reads one from each line of standard input", metavar="TEXT")
    image: list[str] = option([], "pictures; for a region model, .npz files", metavar="FILE")
    key: list[str] = option([], "images of the index, by their keys", metavar="KEY")
    k: int = option(10, "results", at_least=1)
    among: str | None = option(
        None, "what to search for [images for a text, captions for an image, as far as the index has them]",
        choices=("images", "captions"),
    )
    where: str | None = option(
        None, "only images for which this is true: SQL over key, path and the index's columns, such as \"source = 'coco'\"",
        metavar="EXPRESSION"
    )
    json: bool = option(False, "print JSON instead of a table")
    html: str | None = option(None, "also write a page with pictures", metavar="FILE")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "search",
        help="find images or captions in an index",
        description="Search an index by texts, by pictures or by its own images. Prints a table or JSON, or writes a page.",
    )
    add_command(parser, Command, run)


def run(arguments: Command) -> int:
    from coder_plugin.cli.checks import check_exists, check_folder, check_parent, writing

    check_folder(arguments.index, "an index", command="coder-plugin index")
    if not (arguments.text or arguments.image or arguments.key):
        raise CoderError("nothing to search for: give --text, --image or --key")
    for path in arguments.image:
        check_exists(path, flag="--image")
    check_parent(arguments.html, "--html")
    from coder_plugin.search.searcher import open_searcher

    searcher = open_searcher(
        arguments.index,
        model=arguments.model_folder,
        verify=arguments.verify,
        parameters=arguments.search_parameters,
        gpu=arguments.gpu,
        need_model=bool(arguments.text or arguments.image),
        reranker=arguments.reranker,
        texts_only=not arguments.image,
    )
    options = {"among": arguments.among, "rerank": arguments.rerank, "where": arguments.where}
    results = [
        (name, picture, searcher.search(query, arguments.k, **options))
        for name, picture, query in _queries(arguments, searcher)
    ]
    records = searcher.index.records
    if arguments.html is not None:
        from coder_plugin.search.page import results_page

        with writing(arguments.html, "--html"):
            Path(arguments.html).write_text(results_page(searcher.index, results), encoding="utf-8")
        echo(f"page: {arguments.html}", file=sys.stderr)
    if arguments.json:
        rows = [
            {"query": name, "results": [_row(rank, hit, records) for rank, hit in enumerate(hits, 1)]}
            for name, _, hits in results
        ]
        echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    lines = []
    for name, _, hits in results:
        lines += [f"{name}:" if len(results) > 1 else "", *_table(hits, arguments.where), ""]
    echo("\n".join(lines).strip("\n"))
    return 0


def _queries(arguments: Command, searcher: Any) -> list[tuple[str, Any, Any]]:
    """The name, the picture (None for a text) and the query of each query."""
    from coder_plugin.search.parquet import storable
    from coder_plugin.search.searcher import load_image

    texts = [storable(text) for value in arguments.text for text in (_read_lines() if value == "-" else [value])]
    queries: list[tuple[str, Any, Any]] = []
    if blank := [text for text in texts if not text.strip()]:
        raise CoderError(f"--text {blank[0]!r}: there is nothing to search for")
    if texts:
        queries += [(text, None, query) for text, query in zip(texts, searcher.text(texts), strict=True)]
    for path in arguments.image:
        picture = load_image(path)
        queries += [(storable(path), picture, query) for query in searcher.image([picture])]
    queries += [(storable(key), searcher.index.thumbnail(key), searcher.key(key)) for key in arguments.key]
    if not queries:
        raise CoderError("nothing to search for: give --text, --image or --key")
    return queries


def _read_lines() -> list[str]:
    return [line.strip() for line in sys.stdin if line.strip()]


def _row(rank: int, hit: Any, records: Any) -> Mapping[str, Any]:
    image = hit.image
    row = {"rank": rank, "score": hit.score, "key": image.key, "image_id": image.image_id, "path": image.path}
    if image.member is not None:
        row["member"] = image.member
    if metadata := records.metadata(image.row):
        row["metadata"] = metadata
    if hit.fused is not None:
        row["fused"] = hit.fused
    if hit.text is not None:
        return {**row, "text": hit.text}
    return {**row, "caption": hit.caption, "captions": list(records.captions_of(hit.image.row))}


def _cell(text: str) -> str:
    """A text of the index in one line that ends; ``--json`` has all of it."""
    line = printable(" ".join(text[: 4 * _LONGEST].split()))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def _table(hits: Sequence[Any], where: str | None) -> list[str]:
    """The lines of a table; an image is shown with its place and the caption that matches best."""
    from coder_plugin.search.records import place

    if not hits:
        return ["no results" if where is None else "no results: --where is true for no image"]
    fused = any(hit.fused is not None for hit in hits)
    rows = [["", "score", *(["fused"] if fused else []), "image", "caption"]]
    for rank, hit in enumerate(hits, 1):
        scores = [f"{hit.score:.4f}", *(["" if hit.fused is None else f"{hit.fused:.4f}"] if fused else [])]
        rows.append([str(rank), *scores, _cell(place(hit.image)), _cell(hit.caption)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.rjust(width) if cell[:1].isdigit() or "score" in cell else cell.ljust(width)
                     for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
