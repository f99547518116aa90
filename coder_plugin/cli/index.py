"""``coder-plugin index`` and ``coder-plugin search``."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from coder_plugin.errors import CoderError
from coder_plugin.index.records import plain


def index_command(arguments: argparse.Namespace) -> str:
    """Make an index of what the flags name; returns what to tell of it."""
    from coder_plugin import distributed
    from coder_plugin.backbones.base import Backbone
    from coder_plugin.cli.flags import read_options
    from coder_plugin.config import OPENING, READING
    from coder_plugin.index.build import build_index
    from coder_plugin.pretrained.build import check_data, example_of
    from coder_plugin.pretrained.open import open_trained, trained_config

    given = read_options(arguments)
    if arguments.run_folder is None and "model" not in given:
        raise CoderError("say which model encodes: a run's or export's folder, hf-hub:OWNER/NAME, or --model with --pretrained")
    # evaluation's data are what is read here; the training data of a run are not
    given.update(train_data=arguments.data, val_data=arguments.data)
    config = trained_config(arguments.run_folder, given, export=arguments.export)
    source, pictures = _data(config, arguments)
    trained = open_trained(config, name=arguments.run_folder)
    if arguments.what != "captions":
        of_regions = isinstance(trained.model, Backbone)
        example = example_of(source, config.data.max_bad_images, of_regions=of_regions)
        check_data(trained.model, example, source.name, config)
    named = {name: given[name] for name in OPENING if name in given}
    spec = arguments.run_folder
    model = {
        "name": trained.name,
        "spec": os.path.abspath(spec) if spec and os.path.exists(spec) else spec,
        "export": arguments.export,
        "options": {name: _absolute(value) for name, value in named.items()},
        "objective": str(trained.model.coder.objective),
        "fingerprint": trained.fingerprint(),
    }
    made = build_index(
        arguments.output,
        trained.encoder(),
        source,
        model=model,
        what=arguments.what,
        factory=arguments.factory,
        thumbnails=arguments.thumbnails,
        rerank=arguments.rerank_items,
        pictures=pictures,
        data={
            "data": _place(arguments.data),
            "split": arguments.split,
            "precision": config.optim.precision,
            **{name: _absolute(getattr(config.data, name)) for name in READING},
        },
    )
    if distributed.rank() != 0:
        return ""
    vectors = ", ".join(
        f"{kind}: {each['items']:,}{' x ' + str(each['views']) if each['views'] > 1 else ''} of {each['dimensions']} dimensions"
        for kind, each in made["vectors"].items()
    )
    lost = f"; {made['unreadable']} images could not be read" if made["unreadable"] else ""
    return f"index {arguments.output}: {made['images']:,} images, {made['captions']:,} captions; vectors of {vectors}{lost}"


def _absolute(value: Any) -> Any:
    return os.path.abspath(value) if isinstance(value, str) and os.path.exists(value) else value


def _place(data: str) -> str:
    """The same name for the same data from whichever folder; a pattern's too, but not a command's or a server's."""
    here = data == "scenes" or "::" in data or "://" in data or data.startswith("pipe:")
    return data if here else os.path.abspath(data)


def _data(config: Any, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The source, and that of the pictures behind regions where there is one."""
    from coder_plugin.data.from_config import make_source
    from coder_plugin.data.pictures import Pictures, is_pictures
    from coder_plugin.report.pictures import pictures_beside

    if config.data.dataset_type == "auto" and config.data.regions is None and is_pictures(arguments.data):
        return Pictures(arguments.data), None
    return make_source(config, split=arguments.split), pictures_beside(config, arguments.split)


def search_command(arguments: argparse.Namespace) -> str:
    """Search an index; returns what to print, and writes the page that ``--html`` names."""
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
    queries = _queries(arguments, searcher)
    found = [
        (name, shown, searcher.search(query, arguments.k, among=arguments.among, rerank=arguments.rerank))
        for name, shown, query in queries
    ]
    lines = []
    if page is not None:
        from coder_plugin.index.page import results_page

        try:
            page.write_text(results_page(searcher.index, found), encoding="utf-8")
        except OSError as error:
            raise CoderError(f"--html {page} cannot be written: {error.strerror or error}") from error
        print(f"page: {page}", file=sys.stderr)
    if arguments.json:
        rows = [
            {"query": name, "results": [_row(rank, hit, searcher.index.records) for rank, hit in enumerate(hits, 1)]}
            for name, _, hits in found
        ]
        return json.dumps(rows, indent=2, ensure_ascii=False)
    for name, _, hits in found:
        lines += [f"{name}:" if len(found) > 1 else "", *_table(hits, searcher.index.records), ""]
    return "\n".join(lines).strip("\n")


def open_searcher(
    folder: str | Path,
    *,
    model: str | None = None,
    verify: bool = True,
    parameters: str | None = None,
    gpu: bool = True,
    need_model: bool = True,
    device: Any = None,
) -> Any:
    """An index with the model that its manifest names, ready to search.

    Args:
        model: a run's or an export's folder, where that model has moved; None: as the manifest has it.
        verify, parameters, gpu: as in :class:`~coder_plugin.index.index.Index`.
        need_model: whether anything will be encoded; else the model is not opened.

    Raises:
        CoderError: no index, a damaged one; its model is gone, or is another one now.
    """
    from coder_plugin.config import OPENING
    from coder_plugin.index.index import Index
    from coder_plugin.index.search import Searcher
    from coder_plugin.pretrained.open import open_trained, trained_config

    index = Index(folder, verify=verify, parameters=parameters, gpu=gpu)
    of = index.manifest["model"]
    if not need_model and not index.manifest["plan"]["re-ranking"]:
        return Searcher(index, None)
    spec = model or of["spec"]
    try:
        options = {name: value for name, value in of["options"].items() if name in OPENING}
        config = trained_config(spec, options, export=of["export"])
        trained = open_trained(config, name=str(spec or of["name"]), device=device)
    except CoderError as error:
        raise CoderError(f"{folder}: its model cannot be opened (--model says where it is now): {error}") from error
    return Searcher(index, trained)


def _queries(arguments: argparse.Namespace, searcher: Any) -> list[tuple[str, Any, Any]]:
    """What to call each query, the picture to show of it, and the query."""
    texts = [plain(text) for given in arguments.text or [] for text in (_read_lines() if given == "-" else [given])]
    queries: list[tuple[str, Any, Any]] = []
    if blank := [text for text in texts if not text.strip()]:
        raise CoderError(f"--text {blank[0]!r}: there is nothing to search for")
    if texts:
        queries += [(text, None, query) for text, query in zip(texts, searcher.text(texts), strict=True)]
    for path in arguments.image or []:
        loaded = _load(path)
        queries += [(plain(path), loaded, query) for query in searcher.image([loaded])]
    queries += [(plain(key), _small(searcher.index.records, key), searcher.key(key)) for key in arguments.key or []]
    if not queries:
        raise CoderError("nothing to search for: give --text, --image or --key")
    return queries


def _small(records: Any, key: str) -> Any:
    """The thumbnail of an image of the index, if it has one."""
    row = records.row_of(key)
    content = None if row is None else records.thumbnail(row)
    return None if content is None else Image.open(io.BytesIO(content))


def _read_lines() -> list[str]:
    return [line.strip() for line in sys.stdin if line.strip()]


def _load(path: str) -> Any:
    """A picture, or the regions of an .npz as region shards have them."""
    from coder_plugin.data.regions.arrays import decode_npz
    from coder_plugin.data.source import decode_image

    try:
        if path.lower().endswith(".npz"):
            return decode_npz(Path(path).read_bytes(), path)
        return decode_image(path)
    except (OSError, ValueError) as error:
        raise CoderError(f"--image {path} cannot be read: {error}") from error


def _row(rank: int, hit: Any, records: Any) -> Mapping[str, Any]:
    row = {"rank": rank, "score": hit.score, "key": hit.image.key, "image_id": hit.image.image_id}
    if hit.fused is not None:
        row["fused"] = hit.fused
    if hit.text is not None:
        return {**row, "text": hit.text}
    return {**row, "captions": list(records.captions_of(hit.image.row))}


def _table(hits: Sequence[Any], records: Any) -> list[str]:
    """Lines in columns; of an image its first caption."""
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
