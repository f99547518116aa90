"""Charts of the report: matplotlib's SVG, inside the page, in the page's colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from coder_plugin.html import Html

_SIZE = (4.7, 2.6)  # inches; the page scales a chart to the width of its column
_LARGEST = 1e100  # greater numbers are gaps: matplotlib's axes overflow
_LINES = ("-", "--", ":", "-.")
#: Colours are drawn as these numbers, and replaced by the page's variables, which a dark theme changes.
_COLOURS = {f"#0101{number:02d}": f"var(--c{number})" for number in range(8)} | {"#010199": "var(--quiet)"}
_QUIET = "#010199"


class Figure(NamedTuple):
    """A chart or a picture with its name and a sentence below; ``chart`` is empty if there is only the sentence."""

    name: str
    chart: Html = Html("")
    note: str = ""
    uri: str = ""


class Series(NamedTuple):
    """A line: its name and its points in the order of ``x``. ``colour``: a number, where several charts share colours."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int | None = None


def colour(number: int) -> str:
    """The colour of a line, from 0, as matplotlib draws it."""
    return f"#0101{number % 8:02d}"


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure; sizes in inches. pyplot, with its global state, is not used."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width, height), layout="constrained")


@contextmanager
def plain_text() -> Any:
    """matplotlib draws texts of data as they are: no mathematics between dollars, and texts, not outlines, in SVG."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "report"}):
        yield


def lines(series: Sequence[Series], *, zero: bool = False, x_label: str = "step") -> Html:
    """Lines over a common axis; single points are dots. Several lines, and lines with a colour, are named in a legend."""
    with _axes(x_label) as (axes, result):
        for number, each in enumerate(series):
            number = number if each.colour is None else each.colour
            x, y = _finite(each.x), _finite(each.y)
            marker = "o" if len(y) <= 12 else None
            style = _LINES[number // 8 % len(_LINES)]
            axes.plot(x, y, style, color=colour(number), label=_label(each.name), lw=1.4, marker=marker, ms=3)
        if zero:
            axes.update_datalim([(_finite(series[0].x)[0], 0.0)], updatex=False)
            axes.autoscale_view()
        if len(series) > 1 or series[0].colour is not None:
            _legend(axes)
    return result[0]


def histogram(values: Sequence[float], *, x_label: str) -> Html:
    """A histogram of whole numbers, one or more; each bin covers equally many of them."""
    low, high = min(values), max(values)
    width = math.ceil((high - low + 1) / 31)
    edges = np.arange(low, high + width + 1, width) - 0.5
    with _axes(x_label) as (axes, result):
        axes.stairs(np.histogram(values, edges)[0], edges, fill=True, alpha=0.55, color=colour(0))
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="y", integer=True)
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    return result[0]


def scatter(images: np.ndarray, texts: np.ndarray, *, linked: bool = True) -> Html:
    """Points [N, 2] of images and [T, 2] of captions, of each image one and with a line between the two if ``linked``."""
    with _axes("", size=(7, 5)) as (axes, result):
        if linked:
            links = np.stack([images, texts, np.full_like(images, np.nan)], 1).reshape(-1, 2)  # a gap after each pair
            axes.plot(*links.T, color=_QUIET, lw=0.4, alpha=0.5)
        small = 1.0 if linked else 0.6
        axes.plot(*texts.T, "x", color=colour(1), ms=4 * small, label="captions")
        axes.plot(*images.T, "o", color=colour(0), ms=3.5 * small, label="images")
        axes.set(xticks=(), yticks=(), aspect="equal")
        _legend(axes)
    return result[0]


def intervals(rows: Sequence[tuple[str, Sequence[float], tuple[float, float] | None]], *, line: float, x_label: str) -> Html:
    """A line of each row from the low to the high end of its interval, with dots; one row below the other.

    Args:
        rows: names, dots and intervals.
        line: where a dashed line is drawn.
        x_label: what the axis measures.
    """
    with _axes(x_label, size=(_SIZE[0], 0.7 + 0.3 * len(rows))) as (axes, result):
        for place, (_, dots, ends) in enumerate(rows):
            if ends is not None:
                axes.plot(ends, [place, place], color=colour(0), lw=2)
            axes.plot(dots, [place] * len(dots), "o", color=colour(1), ms=4)
        axes.axvline(line, color=_QUIET, lw=1, ls="--")
        axes.set_yticks(range(len(rows)), [_label(name) for name, _, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
    return result[0]


@contextmanager
def _axes(x_label: str, size: tuple[float, float] = _SIZE) -> Any:
    """Axes to draw into, and a list that holds the SVG afterwards."""
    figure = new_figure(*size)
    result: list[Html] = []
    with plain_text():
        axes = figure.subplots()
        yield axes, result
        axes.set_xlabel(x_label, color=_QUIET, fontsize=9)
        axes.tick_params(colors=_QUIET, labelsize=9)
        axes.grid(alpha=0.25, color=_QUIET)
        axes.spines[:].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_offset_text().set_color(_QUIET)
            if hasattr(axis.get_major_formatter(), "set_powerlimits"):
                axis.get_major_formatter().set_powerlimits((-3, 5))
                axis.get_major_locator().set_params(nbins=5)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    result.append(Html(re.sub("#0101[0-9]{2}", lambda match: _COLOURS.get(match[0], match[0]), svg)))


def _legend(axes: Any) -> None:
    size = 8 * axes.figure.get_figwidth() / _SIZE[0]  # the page shows all charts in columns of about one width
    axes.figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=size, handlelength=1.6, labelcolor=_QUIET)


def _label(name: str) -> str:
    """A legend's entry; matplotlib hides those that begin with an underscore."""
    name = name if len(name) <= 14 else f"{name[:13]}…"
    return f" {name}" if name.startswith("_") else name


def _finite(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, np.float64)
    return np.where(np.abs(array) < _LARGEST, array, np.nan)


def format_number(value: float) -> str:
    """Format a number with about four significant digits.

    Example:
        >>> format_number(266.34), format_number(12300), format_number(1.2e-5)
        ('266.3', '12,300', '1.2e-05')
    """
    if value == 0 or not math.isfinite(value) or not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value)))) if abs(value) >= 1 else 4}f}".rstrip("0").rstrip(".")
