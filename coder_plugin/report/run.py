"""The report of a training run: its folder, its model and its validation data as one HTML file.

What cannot be shown is named with the reason; the rest of the report is written all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from coder_plugin import __version__, distributed
from coder_plugin.data.from_config import make_source, pictures_under_regions
from coder_plugin.errors import CoderError
from coder_plugin.html import render
from coder_plugin.pretrained.encode import Encoded, Encoder
from coder_plugin.pretrained.open import default_export, open_pretrained, saved_data_config
from coder_plugin.report import curves, description, recall_table, sections
from coder_plugin.report.alignment import LOCALS
from coder_plugin.report.page import Content, format_seconds, make_content, write_page
from coder_plugin.report.recall_table import Cell
from coder_plugin.report.sections import Evaluated
from coder_plugin.report.state import state_blocks
from coder_plugin.training.run_folder import RunFolder

log = logging.getLogger(__name__)


def write_report(
    folder: str | Path,
    *,
    encoder: Encoder | None = None,
    source: Any = None,
    encoded: Encoded | None = None,
    pictures: Any = None,
    weights: str = "model at the end",
    output: str | Path | None = None,
    images: int = 6,
    reason: str = "no model and no validation data were given",
) -> Path:
    """Write a run's report on the first rank.

    With a model and without ``encoded`` all ranks must call it, because they encode together. Otherwise the other ranks
    return at once.

    Args:
        folder: the run's folder.
        encoder: of the run's model, in memory.
        source: validation data, images with captions.
        encoded: ``encoder(source)``, if it is already computed.
        pictures: a source of the pictures of images that are read as regions.
        weights: a name for the model's weights in the report.
        output: the file to write; None: ``report.html`` in the folder.
        images: number of queries of each kind, and of sample images.
        reason: shown in place of the model's results if there is no encoder or no source.

    Returns:
        The file.

    Raises:
        CoderError: the folder is not a run's, or the file cannot be written.

    Example:
        >>> write_report("nowhere")
        Traceback (most recent call last):
        coder_plugin.errors.CoderError: nowhere is not a training run's folder: it has none of config.json, plan.json, ...
    """
    path = Path(output) if output is not None else Path(folder) / "report.html"
    if encoded is None and encoder is not None and source is not None:
        encoded = encoder(source)
    if distributed.rank() != 0:
        return path
    run = RunFolder.read(folder)
    model = Content(None, reason)
    if encoder is not None and source is not None and encoded is not None:
        model = Content(Evaluated(encoder, source, encoded, weights, pictures))
    page = render("run.html", **_values(run, model, images))
    return write_page(path, page)


def report_run(
    folder: str | Path,
    options: Mapping[str, Any],
    *,
    export: str | None = None,
    split: str = "val",
    output: str | Path | None = None,
    images: int = 6,
) -> Path:
    """Write a run's report with one of its exports and the run's validation data, or other data.

    Args:
        folder: the run's folder.
        options: by flag name, such as ``val_data``; they replace the run's.
        export: "best" or "last"; None: best, or last if there is no best.
        split: of Karpathy files, precomp folders and scenes.
        output: the file to write; None: ``report.html`` in the folder.
        images: number of queries of each kind, and of sample images.

    Returns:
        The file.

    Raises:
        CoderError: the folder is not a run's, the file cannot be written, or data named in ``options`` cannot be read.
            (If the run's own data or export cannot be read, the report says so instead.)
    """
    if images < 1:
        raise CoderError(f"--images is {images}; it must be 1 or more")
    run = RunFolder.read(folder)
    options = dict(options)
    if options.get("val_data") and not options.get("train_data"):
        options["train_data"] = options["val_data"]  # not the built-in scenes
    model: dict[str, Any] = {}
    try:
        export = export or default_export(run.path)
        data = saved_data_config(run.path, options)
        source = make_source(data, split=split)
        if source is None:
            raise CoderError("the run had no validation data: name some with --val-data")
        intermediates = LOCALS if sections.aligns(run) else ()
        trained = open_pretrained(
            run.path, options, export=export, name=f"export/{export}", source=source, return_intermediates=intermediates
        )
        encoder = trained.encoder()
        pictures = pictures_under_regions(data, split)
        model = {"encoder": encoder, "source": source, "pictures": pictures, "weights": f"export/{export}"}
        model["encoded"] = encoder(source)
    except (CoderError, OSError) as error:
        if options.get("val_data"):  # named by the user: do not replace a fuller report by a poorer one
            raise CoderError(str(error)) from error
        log.warning("the report shows no results of the model: %s", error)
        model = {"reason": str(error)}
    return write_report(run.path, output=output, images=images, **model)


def _values(run: RunFolder, model: Content, images: int) -> dict[str, Any]:
    """The variables of the template."""
    measured = make_content(model, sections.measure, run)
    figures = measured.value or {}
    folder = Content(run)
    return {
        "run": run,
        "name": run.path.resolve().name,
        "version": __version__,
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "facts": make_content(folder, description.describe),
        "terms": make_content(folder, description.describe_terms),
        "heads": make_content(folder, description.describe_heads),
        "commands": make_content(folder, description.commands),
        "columns": recall_table.COLUMNS,
        "summary": make_content(folder, _tiles, figures),
        "recalls": make_content(folder, _recall_rows, figures, model.value),
        "lengths": figures.get("lengths"),
        "sweeps": figures.get("sweeps", []),
        "measured": measured,
        "objective": make_content(folder, curves.objective),
        "curves": make_content(folder, curves.recalls),
        "health": make_content(folder, curves.health),
        "state": make_content(folder, state_blocks),
        "diversity": make_content(model, sections.diversity, run),
        "reranks": model.value is not None and model.value.encoded.items is not None,
        "examples": make_content(model, sections.examples, figures, images),
        "map": make_content(model, sections.vector_map),
        "concepts": make_content(model, sections.concepts, images),
        "alignments": make_content(model, sections.alignments, run, images),
        "options": sorted((run.config or {}).items()),
    }


def _tiles(run: RunFolder, measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    best = run.results("best")
    figures = best or _last(run) or measured.get("result") or {}
    kind = f"best, epoch {figures['epoch']:g}" if best and "epoch" in figures else "last"
    tiles = []
    if "rsum" in figures:
        tiles.append((f"{figures['rsum']:.1f}", f"R@sum ({kind})"))
        first = {"i2t_r1": "image to text R@1", "t2i_r1": "text to image R@1"}
        tiles += [(f"{figures[key]:.1f} %", name) for key, name in first.items() if key in figures]
        if "images" in figures:
            tiles.append((f"{figures['images']:,.0f}", "validation images"))
    plan, manifest = run.plan or {}, run.manifest or {}
    if "trainable" in plan and "parameters" in plan:
        tiles.append((_millions(plan["trainable"]), f"trained parameters of {_millions(plan['parameters'])}"))
    if manifest:
        tiles.append((f"{manifest['step']:,}", "steps"))
    if run.seconds_per_epoch is not None:
        tiles.append((format_seconds(run.seconds_per_epoch), "per epoch, without evaluation and saving"))
    return tiles


def _last(run: RunFolder) -> Mapping[str, Any]:
    """The last results, also those from before the first step."""
    return run.results("last") or (run.evaluations[-1] if run.evaluations else {})


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"


def _recall_rows(run: RunFolder, measured: Mapping[str, Any], model: Evaluated | None) -> list[tuple[str, list[Cell]]]:
    """Each row's name and its cells."""
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for name, figures in (("best", run.results("best")), ("last", _last(run))):
        if "rsum" in figures:
            rows += _with_shortlist(f"{name}: epoch {figures['epoch']:g}" if "epoch" in figures else name, figures)
    if "result" in measured and model is not None:
        rows += _with_shortlist(f"now: {model.weights}", measured["result"])
    return [(name, recall_table.cells(figures)) for name, figures in rows]


def _with_shortlist(name: str, figures: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    shortlist = figures.get("shortlist")
    if not shortlist:
        return [(name, figures)]
    return [(f"{name}, re-ranked {figures.get('rerank', '')}".rstrip(), figures), (f"{name}, shortlist", shortlist)]
