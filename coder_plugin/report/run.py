"""The report of a training run: its folder, its model and its validation data as one HTML file.

What cannot be shown is named with the reason; the rest of the report is written all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin import __version__, distributed
from coder_plugin.data.from_config import make_source, pictures_under_regions
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.metrics import RECALL_COLUMNS
from coder_plugin.files import atomic_write
from coder_plugin.html import render
from coder_plugin.pretrained.encode import Encoded, Encoder
from coder_plugin.pretrained.open import open_pretrained, saved_data_config
from coder_plugin.report import curves, description, sections
from coder_plugin.report.alignment import LOCALS
from coder_plugin.report.sections import Evaluated
from coder_plugin.report.state import state_blocks
from coder_plugin.training.run_folder import RunFolder

log = logging.getLogger(__name__)


class Content(NamedTuple):
    """The content of a section, or None and the reason why there is none."""

    value: Any
    reason: str = ""


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
    try:
        with atomic_write(path, "w") as file:
            file.write(page)
    except OSError as error:
        raise CoderError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error
    return path


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
        export = export or _default_export(run)
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


def _default_export(run: RunFolder) -> str:
    exports = run.path / "export"
    return "last" if (exports / "last").is_dir() and not (exports / "best").is_dir() else "best"


def _values(run: RunFolder, model: Content, images: int) -> dict[str, Any]:
    """The variables of the template."""
    measured = _content(model, sections.measure, run)
    figures = measured.value or {}
    folder = Content(run)
    return {
        "run": run,
        "name": run.path.resolve().name,
        "version": __version__,
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "facts": _content(folder, description.describe),
        "terms": _content(folder, description.describe_terms),
        "heads": _content(folder, description.describe_heads),
        "commands": _content(folder, description.commands),
        "columns": RECALL_COLUMNS,
        "summary": _content(folder, _tiles, figures),
        "recalls": _content(folder, _recall_rows, figures, model.value),
        "lengths": figures.get("lengths"),
        "sweeps": figures.get("sweeps", []),
        "measured": measured,
        "objective": _content(folder, curves.objective),
        "curves": _content(folder, curves.recalls),
        "health": _content(folder, curves.health),
        "state": _content(folder, state_blocks),
        "diversity": _content(model, sections.diversity, run),
        "reranks": model.value is not None and model.value.encoded.items is not None,
        "examples": _content(model, sections.examples, figures, images),
        "map": _content(model, sections.vector_map),
        "concepts": _content(model, sections.concepts, images),
        "alignments": _content(model, sections.alignments, run, images),
        "options": sorted((run.config or {}).items()),
    }


def _content(given: Content, make: Callable[..., Any], *others: Any) -> Content:
    """A section's content, or the reason why there is none.

    A bug in one section is logged and shown there. It must not end a run that has trained for days.
    """
    if given.value is None:
        return given
    try:
        return Content(make(given.value, *others))
    except CoderError as error:
        return Content(None, str(error))
    except Exception as error:
        log.warning("a section of the report could not be made", exc_info=True)
        return Content(None, f"this section could not be made: {type(error).__name__}: {error}")


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
    return tiles


def _last(run: RunFolder) -> Mapping[str, Any]:
    """The last results, also those from before the first step."""
    return run.results("last") or (run.evaluations[-1] if run.evaluations else {})


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"


def _recall_rows(run: RunFolder, measured: Mapping[str, Any], model: Evaluated | None) -> list[tuple[str, list[str]]]:
    """Each row's name and the texts of its columns."""
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for name, figures in (("best", run.results("best")), ("last", _last(run))):
        if "rsum" in figures:
            rows += _with_shortlist(f"{name}: epoch {figures['epoch']:g}" if "epoch" in figures else name, figures)
    if "result" in measured and model is not None:
        rows += _with_shortlist(f"now: {model.weights}", measured["result"])
    columns = RECALL_COLUMNS.values()
    return [(name, [f"{figures[key]:.1f}" if key in figures else "–" for key in columns]) for name, figures in rows]


def _with_shortlist(name: str, figures: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    shortlist = figures.get("shortlist")
    if not shortlist:
        return [(name, figures)]
    return [(f"{name}, re-ranked {figures.get('rerank', '')}".rstrip(), figures), (f"{name}, shortlist", shortlist)]
