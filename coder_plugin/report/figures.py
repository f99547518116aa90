"""Figures of the analyses of ``eval`` (AsCL, figures 4 and 5) and of words on their regions (SelfAlign, figure 4)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError, install_command
from coder_plugin.evaluation.analyses import length_labels, ranked_by
from coder_plugin.report.alignment import Alignment, brightness
from coder_plugin.report.charts import new_figure, plain_text
from coder_plugin.report.words import FUNCTION_WORDS

_POSITIVE = {
    "image-text": ("alignment", "image_text"),
    "image-text, fused score": ("alignment", "image_text_fused"),
    "text-text": ("alignment", "text_text"),
}
_NEGATIVE = {"images": ("uniformity", "images"), "texts of different images": ("uniformity", "texts")}
_RECALLS = {"R@1": "t2i_r1", "R@5": "t2i_r5", "R@10": "t2i_r10"}
#: Brightness of the least relevant region, dark but still visible.
_DIM = 0.12
_PANEL = 4.2  # inches


def check_figures(flag: str, folder: str | Path, lacks: str, *modules: str) -> None:
    """Fail before any encoding if figures cannot be drawn.

    Args:
        flag: the flag that asks for figures.
        folder: where they go; it is made.
        lacks: what the message says if one of ``modules`` cannot be imported.

    Raises:
        CoderError: a module is missing, or the folder cannot be made.
    """
    try:
        for module in modules:
            __import__(module)
        Path(folder).mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        raise CoderError(f"{flag} {lacks}: {install_command('report')}") from error
    except OSError as error:
        raise CoderError(f"{flag} {folder} cannot be made: {error}") from error


def plot_analyses(rows: Mapping[str, Mapping[str, Any]], folder: str | Path) -> list[Path]:
    """Draw the analyses of one or several models, as PNG.

    ``alignment`` (AsCL figure 4a) and ``uniformity`` (4b) are bars of mean distances, ``recall_by_length`` (figure 5) is
    text-to-image recall by query length. Distances compare embeddings, and of image-text pairs also by the fused score
    where a model has one; the legend of ``recall_by_length`` names the score that ranked. What a model has no pairs or no
    captions for is left blank.

    Args:
        rows: model name -> result of :func:`coder_plugin.evaluation.analyses.analyse`, also read back from JSON. All with
            the same ``edges``.
        folder: where the figures go. It is made; files of the same names are replaced.

    Returns:
        The three files, in the order above.

    Raises:
        CoderError: matplotlib is not installed, no rows, rows with different bins.

    Example:
        >>> plot_analyses({}, "figures")
        Traceback (most recent call last):
        coder_plugin.errors.CoderError: there is no model to report on
    """
    labels = length_labels(rows)
    folder = Path(folder)
    with plain_text():
        figures = {
            "alignment": _bars(rows, _POSITIVE, "Positive pairs, distance of embeddings"),
            "uniformity": _bars(rows, _NEGATIVE, "Pairs that differ, distance of embeddings"),
            "recall_by_length": _lines(rows, labels),
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight")
    return [folder / f"{name}.png" for name in figures]


def _bars(rows: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, tuple[str, str]], title: str) -> Any:
    """A group of bars per kind of pair; in each group a bar per model. Kinds that no model has are left out."""
    kinds = {label: (part, pairs) for label, (part, pairs) in kinds.items() if any(pairs in row[part] for row in rows.values())}
    figure, [axes] = _panels(1, len(rows))
    width = 0.8 / len(rows)
    handles = []
    for number, row in enumerate(rows.values()):
        measured = {at: row[part].get(pairs, {}) for at, (part, pairs) in enumerate(kinds.values())}
        values = {at: pairs for at, pairs in measured.items() if pairs.get("count")}
        bars = axes.bar(
            [at + (number - (len(rows) - 1) / 2) * width for at in values],
            [pairs["mean"] for pairs in values.values()],
            width,
            yerr=[pairs["std"] for pairs in values.values()],
            color=f"C{number % 10}",
            capsize=3,
        )
        axes.bar_label(bars, fmt="%.3f", label_type="center", rotation=90 if len(rows) > 3 else 0)
        handles.append(bars)
    axes.set(title=title, ylabel="mean distance (whisker: standard deviation)", ylim=(0, None), xlim=(-0.5, len(kinds) - 0.5))
    axes.set_xticks(range(len(kinds)), list(kinds))
    _legend(figure, handles, rows)
    return figure


def _lines(rows: Mapping[str, Mapping[str, Any]], labels: Sequence[str]) -> Any:
    """A panel per recall; in each a line per model over the bins of query length."""
    figure, panels = _panels(len(_RECALLS), len(rows))
    bins_of_rows = [row["recall_by_length"]["bins"] for row in rows.values()]
    counts = [[each["count"] for each in bins] for bins in bins_of_rows]
    ticks = list(labels)
    if all(other == counts[0] for other in counts):  # the same captions: show how many are behind a point
        ticks = [f"{label}\n({count})" for label, count in zip(labels, counts[0], strict=True)]
    for axes, (title, key) in zip(panels, _RECALLS.items(), strict=True):
        handles = []
        for number, bins in enumerate(bins_of_rows):
            recalls = [float("nan") if each[key] is None else each[key] for each in bins]  # NaN interrupts the line
            handles += axes.plot(range(len(bins)), recalls, color=f"C{number % 10}", marker="o")
        axes.set(title=f"Text to image {title}", xlabel="words of the query (captions)", ylabel="%")
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set_xticks(range(len(labels)), ticks, fontsize="small")
        axes.grid(alpha=0.3)
    _legend(figure, handles, [f"{name} (by {ranked_by(row)})" if ranked_by(row) else name for name, row in rows.items()])
    return figure


def _panels(count: int, models: int) -> tuple[Any, list[Any]]:
    """A figure and its panels side by side, with room below for one line per model."""
    figure = new_figure(1 + 4.5 * count, 3.5 + 0.22 * models)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _legend(figure: Any, handles: Sequence[Any], names: Iterable[str]) -> None:
    """The models' names below the panels: names are often paths, too long for the inside."""
    figure.legend(handles, list(map(str, names)), loc="outside lower center", ncols=1, frameon=False)


# -- words and regions ------------------------------------------------------------------------------------------------


def write_alignments(alignments: Sequence[Alignment], folder: str | Path) -> list[Path]:
    """Write a figure for each, ``alignment-000.png`` …, and ``alignment.json`` with all numbers.

    Each entry of the JSON names its ``figure``, which is null if the places of the regions are unknown.

    Returns:
        The files.

    Raises:
        CoderError: matplotlib is not installed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths, rows = [], []
    for number, alignment in enumerate(alignments):
        path = folder / f"alignment-{number:03d}.png"
        drawable = alignment.boxes is not None and alignment.picture is not None
        if drawable:
            plot_alignment(alignment).savefig(path, dpi=110, bbox_inches="tight")
            paths.append(path)
        rows.append({"figure": path.name if drawable else None, **alignment.to_dict()})
    paths.append(folder / "alignment.json")
    paths[-1].write_text(json.dumps(rows, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths


def plot_alignment(alignment: Alignment) -> Any:
    """A matplotlib figure of one caption on its image.

    On the left the region of each word is outlined in the word's colour. On the right, if a head computes it, the picture is
    brighter where a region is more relevant to the caption. Function words
    (:data:`~coder_plugin.report.words.FUNCTION_WORDS`) are not drawn: they would cover the words that name something.

    Raises:
        CoderError: matplotlib is not installed, or the places of the regions are unknown.
    """
    if alignment.boxes is None or alignment.picture is None:
        raise CoderError(f"{alignment.key}: its regions have no boxes, so they cannot be drawn")
    height, width = alignment.picture.shape[:2]
    panels = 1 if alignment.region_context is None else 2
    ratio = min(2.0, max(0.4, height / width))
    title = textwrap.wrap(alignment.caption, 48 * panels)
    legend_rows = sum(word not in FUNCTION_WORDS for word in alignment.words) // (3 * panels) + 1
    figure = new_figure(panels * _PANEL, _PANEL * ratio + 0.3 + 0.2 * (len(title) + legend_rows))
    with plain_text():
        axes = list(figure.subplots(1, panels, squeeze=False)[0])
        axes[0].imshow(alignment.picture, extent=(0, width, height, 0))
        handles = _outline(axes[0], alignment, width, height)
        if alignment.region_context is not None:
            light = _DIM + (1 - _DIM) * brightness(alignment.region_context, alignment.boxes, height, width)
            axes[1].imshow((alignment.picture * light[..., None]).round().astype(np.uint8), extent=(0, width, height, 0))
            for box in alignment.boxes:  # without an outline the darkest region would be invisible
                _rectangle(axes[1], box * [width, height, width, height], lw=0.4, edgecolor="0.6")
            low, high = alignment.region_context.min(), alignment.region_context.max()
            axes[1].set_xlabel(f"context: cosine {low:.2f} (dark) to {high:.2f}")
        for each in axes:
            each.set(xlim=(0, width), ylim=(height, 0), xticks=(), yticks=())
        figure.suptitle("\n".join(title), fontsize="medium")
        if handles:
            labels = [handle.get_label() for handle in handles]
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3 * panels), frameon=False)
    return figure


def _outline(axes: Any, alignment: Alignment, width: int, height: int) -> list[Any]:
    """Outline and name each word's region. Outlines of words with the same region are nested, their names stacked."""
    import matplotlib

    assert alignment.boxes is not None
    colours = [matplotlib.colormaps["tab20"](number) for number in (*range(0, 20, 2), *range(1, 20, 2))]
    line = max(width, height) / 90  # of an outline, in pixels of the picture
    handles: list[Any] = []
    depth_of: dict[int, int] = {}
    for number, (word, region) in enumerate(zip(alignment.words, alignment.regions.tolist(), strict=True)):
        if word in FUNCTION_WORDS:
            continue
        left, top, right, bottom = alignment.boxes[region] * [width, height, width, height]
        depth = depth_of[region] = depth_of.get(region, -1) + 1
        inset = min((depth + 0.5) * line, 0.45 * (right - left), 0.45 * (bottom - top))
        colour = colours[len(handles) % len(colours)]
        edges = (left + inset, top + inset, right - inset, bottom - inset)
        label = f"{word} {alignment.similarity[number, region]:.2f}"
        handles.append(_rectangle(axes, edges, ec=colour, lw=2, label=label))
        place = {"xytext": (2, -2 - 10 * depth), "textcoords": "offset points", "va": "top"}
        patch = {"boxstyle": "square,pad=0.1", "facecolor": colour, "edgecolor": "none"}
        axes.annotate(word, (left, top), **place, fontsize=8, color="white", bbox=patch)
    return handles


def _rectangle(axes: Any, edges: Sequence[float], **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    left, top, right, bottom = edges
    return axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, **style))
