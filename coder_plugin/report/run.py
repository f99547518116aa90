"""``coder-plugin report RUN``: everything a run's folder, its model and its validation data tell, as one HTML file.

What cannot be shown says why in a line, and the rest is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin import __version__, distributed
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.metrics import RECALL_COLUMNS
from coder_plugin.html import render
from coder_plugin.pretrained.encode import Encoded, Encoder
from coder_plugin.report import commands, curves, facts, seen
from coder_plugin.report.health import state_blocks
from coder_plugin.report.records import Run, read_run
from coder_plugin.report.seen import Evaluated

log = logging.getLogger(__name__)


class Content(NamedTuple):
    """What a section shows; None: nothing, and why."""

    value: Any
    reason: str = ""


def write_report(
    folder: str | Path,
    *,
    encoder: Encoder | None = None,
    source: Any = None,
    encoded: Encoded | None = None,
    beside: Any = None,
    weights: str = "model at the end",
    output: str | Path | None = None,
    images: int = 6,
    reason: str = "no model and no validation data were given",
) -> Path:
    """Write a run's report on the first rank. Without ``encoded`` every rank calls this, for encoding is shared; with it, or
    without a model, the ranks have nothing to do together, and the others return at once.

    Args:
        folder: the run's.
        encoder: of its model, in memory. source: validation data. encoded: what the encoder gives of these, if it is at hand.
        beside: a source of the pictures of images that are read as regions.
        weights: which of the run's these are, in words.
        output: the file; None: ``report.html`` in the folder.
        images: how many queries of each kind, and sample images, are shown.
        reason: why there is no encoder or no source.

    Returns:
        The file.

    Raises:
        CoderError: the folder is no run's, or the file cannot be written.
    """
    path = Path(output) if output is not None else Path(folder) / "report.html"
    if encoded is None and encoder is not None and source is not None:
        encoded = encoder(source)
    if distributed.rank() != 0:
        return path
    run = read_run(folder)
    model = Content(None, reason)
    if encoder is not None and source is not None and encoded is not None:
        model = Content(Evaluated(encoder, source, encoded, weights, beside))
    page = render("run.html", **_values(run, model, images))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(page, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise CoderError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return path


def report_command(arguments: Any) -> Path:
    """``coder-plugin report``: with the run's export, and the data that the flags or the run's options name."""
    from coder_plugin.data.from_config import make_pictures, make_source
    from coder_plugin.pretrained.open import open_pretrained, saved_data_config
    from coder_plugin.report.alignment import LOCALS

    if arguments.images < 1:
        raise CoderError(f"--images is {arguments.images}; it must be 1 or more")
    run = read_run(arguments.run_folder)
    given = dict(arguments.options)
    if given.get("val_data") and not given.get("train_data"):
        given["train_data"] = given["val_data"]  # not the built-in scenes
    named = bool(given.get("val_data"))
    found: dict[str, Any] = {}
    try:
        export = arguments.export or _export_of(run)
        data = saved_data_config(run.folder, given)
        source = make_source(data, split=arguments.split)
        if source is None:
            raise CoderError("the run had no validation data: name some with --val-data")
        catch = LOCALS if seen.aligns(run) else ()
        trained = open_pretrained(
            run.folder, given, export=export, name=f"export/{export}", source=source, return_intermediates=catch
        )
        beside = make_pictures(data, split=arguments.split)
        found = {"encoder": trained.encoder(), "source": source, "beside": beside, "weights": f"export/{export}"}
        found["encoded"] = found["encoder"](source)
    except (CoderError, OSError) as error:
        if named:
            raise CoderError(str(error)) from error  # a slip; and a fuller report may be there already
        log.warning("the report shows no results of the model: %s", error)
        found = {"reason": str(error)}
    return write_report(run.folder, output=arguments.output, images=arguments.images, **found)


def _export_of(run: Run) -> str:
    best = run.folder / "export" / "best"
    return "best" if best.is_dir() or not (run.folder / "export" / "last").is_dir() else "last"


def _values(run: Run, model: Content, images: int) -> dict[str, Any]:
    """What the template reads."""
    measured = _attempt(model, seen.measure, run)
    known = measured.value or {}
    own = Content(run)
    return {
        "run": run,
        "name": run.folder.resolve().name,
        "version": __version__,
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "facts": _attempt(own, facts.described),
        "terms": _attempt(own, facts.terms_of),
        "heads": _attempt(own, facts.heads_of),
        "commands": _attempt(own, _commands),
        "columns": RECALL_COLUMNS,
        "summary": _attempt(own, _tiles, known),
        "recalls": _attempt(own, _recall_rows, known, model.value),
        "lengths": known.get("lengths"),
        "sweeps": known.get("sweeps", []),
        "measured": measured,
        "objective": _attempt(own, curves.objective),
        "curves": _attempt(own, curves.recalls),
        "health": _attempt(own, curves.health),
        "state": _attempt(own, state_blocks),
        "diversity": _attempt(model, seen.diversity, run),
        "reranks": model.value is not None and model.value.encoded.items is not None,
        "examples": _attempt(model, seen.examples, known, images),
        "map": _attempt(model, seen.both_sides),
        "concepts": _attempt(model, seen.concepts, images),
        "alignments": _attempt(model, seen.alignments, run, images),
        "options": sorted((run.config or {}).items()),
    }


def _attempt(given: Content, make: Callable[..., Any], *others: Any) -> Content:
    """A section's content, or why there is none. A fault of ours is told of there and in the log: it must not end a run that
    has trained for days, whose report this is."""
    if given.value is None:
        return given
    try:
        return Content(make(given.value, *others))
    except CoderError as error:
        return Content(None, str(error))
    except Exception as error:
        log.warning("a part of the report could not be made", exc_info=True)
        return Content(None, f"this part could not be made: {type(error).__name__}: {error}")


def _commands(run: Run) -> list[tuple[str, str]]:
    folder = str(run.folder)
    found = [("evaluate", commands.eval_command(folder)), ("write this report", commands.report_command(folder))]
    if run.config is not None:
        ranks = int((run.plan or {}).get("ranks", 1))
        try:
            found.insert(0, ("train", commands.train_command(run.config, ranks=ranks)))
            if (run.manifest or {}).get("epoch", 0) < (run.config.get("epochs") or 0):
                going = commands.resume_command(run.config, run.folder.resolve(), ranks=ranks)
                found.insert(1, ("go on with the run, which has not come to its last epoch", going))
        except CoderError as error:
            found.insert(0, ("train", f"# {error}"))
    return found


def _tiles(run: Run, known: Mapping[str, Any]) -> list[tuple[str, str]]:
    figures = run.best or run.last or known.get("result") or {}
    kind = f"best, epoch {figures['epoch']:g}" if run.best and "epoch" in figures else "last"
    tiles = []
    if "rsum" in figures:
        tiles.append((f"{figures['rsum']:.1f}", f"R@sum ({kind})"))
        first = {"i2t_r1": "image to text R@1", "t2i_r1": "text to image R@1"}
        tiles += [(f"{figures[key]:.1f} %", what) for key, what in first.items() if key in figures]
        if "images" in figures:
            tiles.append((f"{figures['images']:,.0f}", "validation images"))
    plan, manifest = run.plan or {}, run.manifest or {}
    if "trainable" in plan and "parameters" in plan:
        tiles.append((_millions(plan["trainable"]), f"trained parameters of {_millions(plan['parameters'])}"))
    if manifest:
        tiles.append((f"{manifest['step']:,}", "steps"))
    return tiles


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"


def _recall_rows(run: Run, known: Mapping[str, Any], model: Evaluated | None) -> list[tuple[str, list[str]]]:
    """Of each row its name, and the texts of the columns."""
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for name, figures in (("best", run.best), ("last", run.last)):
        if "rsum" in figures:
            when = f"{name}: epoch {figures['epoch']:g}" if "epoch" in figures else name
            rows += _with_shortlist(when, figures)
    if "result" in known and model is not None:
        rows += _with_shortlist(f"now: {model.weights}", known["result"])
    columns = RECALL_COLUMNS.values()
    return [(name, [f"{figures[key]:.1f}" if key in figures else "–" for key in columns]) for name, figures in rows]


def _with_shortlist(name: str, figures: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    shortlist = figures.get("shortlist")
    if not shortlist:
        return [(name, figures)]
    return [(f"{name}, re-ranked {figures.get('rerank', '')}".rstrip(), figures), (f"{name}, shortlist", shortlist)]
