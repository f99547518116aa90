"""The report of a training run: its folder, its model and its validation data as one HTML file.

What cannot be shown is named with the reason; the rest of the report is written all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coder_plugin import distributed
from coder_plugin.data.from_config import make_source, pictures_under_regions
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.encode import Encoded, Encoder
from coder_plugin.pretrained.open import default_export, open_pretrained, saved_data_config
from coder_plugin.report import curves, facts, sections
from coder_plugin.report.alignment import LOCALS
from coder_plugin.report.charts import Figure
from coder_plugin.report.page import (
    RECALL,
    RECALL_NOTE,
    Block,
    Section,
    attempt,
    figures,
    format_seconds,
    heading,
    note,
    recall_cells,
    table,
    write_page,
)
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
    model = None
    if encoder is not None and source is not None and encoded is not None:
        model = Evaluated(weights, encoded, source, pictures, {}, encoder)
    shown = _sections(run, model, images, reason)
    about = " on ".join(filter(None, [_objective(run), str((run.plan or {}).get("model") or "")]))
    title = f"{run.path.resolve().name}: training report"
    return write_page(
        path, title, shown, subtitle=f"{about}." * bool(about), problems=list(map(str, run.problems)), tiles=_tiles(run)
    )


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
    run = RunFolder.read(folder)
    model: dict[str, Any] = {}
    try:
        opened = open_run(run, options, export=export, split=split)
        model = {"weights": opened.name, "encoder": opened.encoder, "source": opened.source}
        model |= {"encoded": opened.encoded, "pictures": opened.pictures}
    except (CoderError, OSError) as error:
        if options.get("val_data"):  # named by the user: do not replace a fuller report by a poorer one
            raise CoderError(str(error)) from error
        log.warning("the report shows no results of the model: %s", error)
        model = {"reason": str(error)}
    return write_report(run.path, output=output, images=images, **model)


def open_run(run: RunFolder, options: Mapping[str, Any], *, export: str | None = None, split: str = "val") -> Evaluated:
    """A run's model, with the data that it was validated on, or others, encoded.

    Args:
        options, export, split: as in :func:`report_run`.

    Raises:
        CoderError: the model or the data cannot be opened.
    """
    options = dict(options)
    if options.get("val_data") and not options.get("train_data"):
        options["train_data"] = options["val_data"]  # not the built-in scenes
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
    return Evaluated(f"export/{export}", encoder(source), source, pictures_under_regions(data, split), {}, encoder)


def _sections(run: RunFolder, model: Evaluated | None, images: int, reason: str) -> list[Section]:
    def of_model(make: Callable[..., list[Block]], *arguments: Any) -> list[Block]:
        return [note(f"Not shown: {reason}")] if model is None else attempt(make, model, *arguments)

    unmeasured = of_model(sections.measure, run)
    lengths = of_model(sections.recall_by_length) if model is not None and model.result else []
    curve_blocks = [*attempt(_charts, "Recall", curves.recalls, run), *attempt(_charts, "Objective", curves.objective, run)]
    about = (facts.fact_blocks, facts.term_blocks, facts.head_blocks, facts.option_blocks)
    health = attempt(_charts, "During the run", curves.health, run)
    return [
        Section("recall", "Recall on validation data", [*attempt(_recall, run, model), *unmeasured, *lengths]),
        Section("examples", "Best and worst queries", of_model(sections.examples, images)),
        Section("curves", "Curves", curve_blocks or [note("Not shown: there is no metrics.jsonl with records")]),
        Section("run", "What was run", [block for make in about for block in attempt(make, run)]),
        Section("concepts", "Concepts", of_model(sections.concepts, images)),
        Section("regions", "Words and regions", of_model(sections.alignments, run, images)),
        Section("map", "Map of images and captions", of_model(sections.vector_map)),
        Section("state", "State of the heads", [*attempt(state_blocks, run), *health]),
    ]


def _charts(title: str, make: Callable[[RunFolder], list[Figure]], run: RunFolder) -> list[Block]:
    made = figures(make(run))
    return [heading(title), *made] if made else []


def _objective(run: RunFolder) -> str:
    return str((run.plan or {}).get("objective") or (run.config or {}).get("loss") or "")


def _last(run: RunFolder) -> Mapping[str, Any]:
    """The last results, also those from before the first step."""
    return run.results("last") or (run.evaluations[-1] if run.evaluations else {})


def _tiles(run: RunFolder) -> list[tuple[str, str]]:
    best = run.results("best")
    results = best or _last(run)
    kind = f"best, epoch {best['epoch']:g}" if "epoch" in best else "last"
    tiles = []
    if "rsum" in results:
        tiles.append((f"{results['rsum']:,.1f}", f"R@sum ({kind})"))
        names = {"i2t_r1": "image to text R@1", "t2i_r1": "text to image R@1"}
        tiles += [(f"{results[key]:.1f} %", name) for key, name in names.items() if key in results]
    if run.manifest is not None:
        tiles.append((f"{run.manifest['step']:,}", "steps"))
    if run.seconds_per_epoch is not None:
        tiles.append((format_seconds(run.seconds_per_epoch), "per epoch, without evaluation and saving"))
    return tiles


def _recall(run: RunFolder, model: Evaluated | None) -> list[Block]:
    rows: list[tuple[str, list[str]]] = []

    def add(name: str, results: Mapping[str, Any]) -> None:
        if shortlist := results.get("shortlist"):
            rows.append((f"{name}, re-ranked {results.get('rerank', '')}".rstrip(), recall_cells(results)))
            rows.append((f"{name}, shortlist", recall_cells(shortlist)))
        elif "rsum" in results:
            rows.append((name, recall_cells(results)))

    for name, results in (("best", run.results("best")), ("last", _last(run))):
        add(f"{name}: epoch {results['epoch']:g}" if "epoch" in results else name, results)
    if model is not None:
        add(f"now: {model.name}", model.result)
    if not rows:
        raise CoderError("the run has no evaluation")
    text = RECALL_NOTE
    if model is not None and model.result:
        text += f" The row that begins with “now” was measured for this report, on {model.source.name}."
    return [note(text), table(["Weights", *RECALL.values()], rows)]
