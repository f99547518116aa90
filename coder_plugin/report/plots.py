"""The figures of `coder_plugin.evaluation.analyses`, as AsCL draws them in figures 4 and 5.

Figures are matplotlib objects of their own: nothing here touches pyplot, its global state or its choice of a display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.analyses import HISTOGRAM_BINS, length_labels

SUFFIXES = ("png", "svg")

_MEAN = "mean distance (whisker: standard deviation)"
_ALIGNED = {"image-text": ("alignment", "image_text"), "text-text": ("alignment", "text_text")}
_APART = {"images": ("uniformity", "images"), "texts of different images": ("uniformity", "texts")}
_RECALLS = {"R@1": "t2i_r1", "R@5": "t2i_r5", "R@10": "t2i_r10"}


def check_figures(flag: str, folder: str | Path, lacks: str, *modules: str) -> None:
    """:class:`CoderError` now, and not after everything has been encoded, where no figure could be drawn.

    Args:
        flag: that asks for them. folder: is made. lacks: what to say where one of ``modules`` cannot be imported.
    """
    try:
        for module in modules:
            __import__(module)
        Path(folder).mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        raise CoderError(f'{flag} {lacks}: pip install "coder-plugin[report]"') from error
    except OSError as error:
        raise CoderError(f"{flag} {folder} cannot be made: {error}") from error


def plot_analyses(rows: Mapping[str, Mapping[str, Any]], folder: str | Path, *, suffix: str = "png") -> list[Path]:
    """Draw the analyses of one or several models.

    ``alignment`` (AsCL figure 4a) and ``uniformity`` (4b) are bars of mean distances, ``distances`` the histograms
    behind the latter, ``recall_by_length`` (figure 5) lines of text-to-image recall. What a model has no pair or no
    caption for is left blank.

    Args:
        rows: name to what `analyse` returned, also read back from JSON, with equal ``edges``.
        folder: where the figures go; made where it is not there, figures of the same names are replaced.
        suffix: "png" or "svg".

    Returns:
        The four files, in the order above.

    Raises:
        CoderError: matplotlib is not installed, no rows, rows of different bins, an unknown suffix.
    """
    labels = length_labels(rows)
    if suffix not in SUFFIXES:
        raise CoderError(f"figures are written as {' or '.join(SUFFIXES)}, got {suffix!r}")
    figures = {
        "alignment": _bars(rows, _ALIGNED, "Positive pairs"),
        "uniformity": _bars(rows, _APART, "Pairs that differ"),
        "distances": _histograms(rows),
        "recall_by_length": _lines(rows, labels),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.{suffix}")
        figure.savefig(paths[-1], dpi=150, bbox_inches="tight")
    return paths


def _bars(rows: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, tuple[str, str]], title: str) -> Any:
    """A group of bars per kind of pair, in each a bar per model."""
    figure, [axes] = _figure(1, len(rows))
    width = 0.8 / len(rows)
    handles = []
    for number, row in enumerate(rows.values()):
        found = {at: row[part][pairs] for at, (part, pairs) in enumerate(kinds.values()) if row[part][pairs]["count"]}
        bars = axes.bar(
            [at + (number - (len(rows) - 1) / 2) * width for at in found],
            [pairs["mean"] for pairs in found.values()],
            width,
            yerr=[pairs["std"] for pairs in found.values()],
            color=f"C{number % 10}",
            capsize=3,
        )
        axes.bar_label(bars, fmt="%.3f", label_type="center", rotation=90 if len(rows) > 3 else 0)
        handles.append(bars)
    axes.set(title=title, ylabel=_MEAN, ylim=(0, None), xlim=(-0.5, len(kinds) - 0.5))
    axes.set_xticks(range(len(kinds)), list(kinds))
    _legend(figure, handles, rows)
    return figure


def _histograms(rows: Mapping[str, Mapping[str, Any]]) -> Any:
    """A panel per kind of pair, in each the distribution of every model's distances."""
    figure, panels = _figure(len(_APART), len(rows))
    edges = [2 * edge / HISTOGRAM_BINS for edge in range(HISTOGRAM_BINS + 1)]
    handles: list[Any] = []
    for axes, (title, (part, pairs)) in zip(panels, _APART.items(), strict=True):
        handles = []
        for number, row in enumerate(rows.values()):
            counts, total = row[part][pairs]["histogram"], row[part][pairs]["count"]
            density = [count * HISTOGRAM_BINS / 2 / max(1, total) for count in counts]
            handles.append(axes.stairs(density, edges, color=f"C{number % 10}"))
        axes.set(title=title, xlabel="distance", ylabel="density", xlim=(0, 2), ylim=(0, None))
    _legend(figure, handles, rows)
    return figure


def _lines(rows: Mapping[str, Mapping[str, Any]], labels: Sequence[str]) -> Any:
    """A panel per recall, in each a line per model over the bins of query length."""
    figure, panels = _figure(len(_RECALLS), len(rows))
    each = [row["recall_by_length"]["bins"] for row in rows.values()]
    counts = [[one["count"] for one in bins] for bins in each]
    ticks = list(labels)
    if all(other == counts[0] for other in counts):  # the same captions: say how many stand behind a point
        ticks = [f"{label}\n({count})" for label, count in zip(labels, counts[0], strict=True)]
    handles: list[Any] = []
    for axes, (title, key) in zip(panels, _RECALLS.items(), strict=True):
        handles = []
        for number, bins in enumerate(each):
            recalls = [float("nan") if one[key] is None else one[key] for one in bins]  # NaN breaks the line
            handles += axes.plot(range(len(bins)), recalls, color=f"C{number % 10}", marker="o")
        axes.set(title=f"Text to image {title}", xlabel="words of the query (captions)", ylabel="%")
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set_xticks(range(len(labels)), ticks, fontsize="small")
        axes.grid(alpha=0.3)
    _legend(figure, handles, rows)
    return figure


def _figure(panels: int, models: int) -> tuple[Any, list[Any]]:
    """A figure and its panels, side by side, with room below for a line per model."""
    figure = new_figure(1 + 4.5 * panels, 3.5 + 0.22 * models)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches.

    Raises:
        CoderError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CoderError('figures need matplotlib: pip install "coder-plugin[report]"') from error

    return Figure(figsize=(width, height), layout="constrained")


def literal(text: str) -> str:
    """Text that matplotlib draws as it is: between dollars it reads mathematics, and a label that begins with an underscore
    it hides."""
    return " " * text.startswith("_") + text.replace("$", r"\$")


def _legend(figure: Any, handles: Sequence[Any], names: Mapping[str, Any]) -> None:
    """The models' names below the panels; names are often paths, too long for a place inside."""
    shown = [literal(str(name)) for name in names]
    figure.legend(handles, shown, loc="outside lower center", ncols=1, frameon=False)
