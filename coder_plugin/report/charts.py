"""Small charts as inline SVG: lines, bars, histograms, points. Colours are the page's (``base.html``), so that they follow its
light and dark; each line and group is named beside its marks, so that no chart is read by colour alone.

A chart is drawn 340 units wide, which is about what a phone has, so that its texts keep their size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from coder_plugin.html import Html

WIDTH, HEIGHT = 340, 190
_TALLEST = 300  # of a map
_LEFT, _TOP, _BOTTOM = 44, 10, 34
_LETTER, _BOLD = 5.8, 6.6  # units of width of a letter at 11
_NAMES = 130  # most that names beside the marks take of the width
#: Points of a line that are drawn, and those that answer a pointer; of longer lines, lows and highs of equal parts stay.
_DRAWN, _HOVER = 240, 40
_COLOURS = 8
_HAIR = 1e-5  # of a tick's distance: rounding


@dataclass(frozen=True)
class Series:
    """A line's points in the order of ``x``."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class _Frame(NamedTuple):
    """Maps numbers to the chart's units."""

    x: tuple[float, float]
    y: tuple[float, float]
    right: float

    def across(self, value: float) -> float:
        low, high = self.x
        return _LEFT + (value - low) / (high - low) * (self.right - _LEFT)

    def up(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _BOTTOM - _TOP)


def lines(series: Sequence[Series], *, label: str, x_label: str = "step", zero: bool = False) -> Html:
    """Lines over a common axis, each named at its end where there are several; a line of one point is a dot.

    Args:
        series: one or more, each with a point or more, all finite.
        label: what the chart shows, for those who cannot see it.
        zero: the axis begins at 0.
    """
    values = [value for each in series for value in each.y]
    low, high = min(values), max(values)
    y, ticks = _scale(min(low, 0.0) if zero else low, high)
    x, x_ticks = _scale(min(each.x[0] for each in series), max(each.x[-1] for each in series), tight=True, count=4)
    names = len(series) > 1
    room = 12 + (_BOLD * max(len(each.name) for each in series) if names else 0)
    frame = _Frame(x, y, WIDTH - min(room, _NAMES))
    parts = _axes(frame, x_ticks, ticks, x_label)
    ends = _apart([frame.up(each.y[-1]) for each in series])
    for number, (each, end) in enumerate(zip(series, ends, strict=True)):
        colour = f"var(--c{number % _COLOURS})"
        kept = _thinned(each.x, each.y)
        path = " ".join(f"{_n(frame.across(a))},{_n(frame.up(b))}" for a, b in kept)
        if len(kept) > 1:
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.7" stroke-linejoin="round"/>'
            )
        dots = kept[:: max(1, math.ceil(len(kept) / _HOVER))]
        shown = 2.2 if len(kept) <= 12 else 0
        for a, b in dots if dots[-1] == kept[-1] else [*dots, kept[-1]]:
            named = f"{each.name}: " if names else ""
            tip = escape(f"{named}{format_number(b)} at {x_label} {format_number(a)}")
            place = f'cx="{_n(frame.across(a))}" cy="{_n(frame.up(b))}"'
            if shown:
                parts.append(f'<circle {place} r="{shown}" fill="{colour}"/>')
            parts.append(f'<circle {place} r="6" fill="transparent"><title>{tip}</title></circle>')
        if names:
            place = f'x="{_n(frame.right + 6)}" y="{_n(end + 4)}" style="fill:{colour};font-weight:600"'
            parts.append(f"<text {place}>{escape(_short(each.name, (_NAMES - 12) / _BOLD))}</text>")
    return _svg(parts, label)


def histogram(
    groups: Mapping[str, Sequence[float]],
    *,
    label: str,
    x_label: str,
    bins: int = 31,  # odd: what is nearly equal lies in the middle of one
    least: float = 0.0,
    top: float | None = None,
    whole: bool = False,
) -> Html:
    """How values are spread, in equal bins over all groups' range; several groups lie one over the other.

    Args:
        groups: a name to its finite values, one or more. least: the range is at least so wide: rounding is no spread.
        top: the range ends there; greater values are in the last bin, which says so.
        whole: the values are integers, and a bin is of equally many of them.
    """
    everything = [value for values in groups.values() for value in values]
    low, high = min(everything), max(everything)
    beyond = top is not None and high > top
    if top is not None:
        high = min(high, top)
    if whole:
        width = math.ceil((high - low + 1) / bins)
        bins = math.ceil((high - low + 1) / width)
        low, high = low - 0.5, low - 0.5 + bins * width
    elif high - low < least or high == low:
        middle, half = (low + high) / 2, least / 2 or max(abs(high) * 0.05, 1e-3)
        low, high = middle - half, middle + half
    x, x_ticks = _scale(low, high, tight=True, count=5)
    edges = [low + (high - low) * number / bins for number in range(bins + 1)]
    counts = {name: _counted(values, edges) for name, values in groups.items()}
    y, ticks = _scale(0.0, float(max(max(each) for each in counts.values())), count=4, whole=True)
    frame = _Frame(x, y, WIDTH - 12)
    parts = _axes(frame, x_ticks, ticks, x_label)
    for number, (name, each) in enumerate(counts.items()):
        colour = f"var(--c{number % _COLOURS})"
        path = f"M{_n(frame.across(edges[0]))},{_n(frame.up(0))}"
        for nth, (count, start, stop) in enumerate(zip(each, edges, edges[1:], strict=False), 1):
            path += f"V{_n(frame.up(count))}H{_n(frame.across(stop))}"
            place = f'x="{_n(frame.across(start))}" y="{_TOP}" width="{_n(frame.across(stop) - frame.across(start))}"'
            first, last = (start + 0.5, stop - 0.5) if whole else (start, stop)
            until = "up" if beyond and nth == bins else f"to {format_number(last)}"
            tip = escape(f"{name}: {count} from {format_number(first)} {until}")
            if count:
                size = f'height="{HEIGHT - _TOP - _BOTTOM}" fill="transparent"'
                parts.append(f"<rect {place} {size}><title>{tip}</title></rect>")
        dash = ' stroke-dasharray="5 3"' if number % 2 else ""
        style = f'fill="{colour}" fill-opacity="0.22" stroke="{colour}" stroke-width="1.5"{dash}'
        parts.append(f'<path d="{path}V{_n(frame.up(0))}" {style} pointer-events="none"/>')
    return _svg(parts, label, legend=list(groups) if len(groups) > 1 else [])


def bars(rows: Sequence[tuple[str, float]], *, label: str, of: float | None = None) -> Html:
    """Horizontal bars of shares, each with its name before and its percentage behind it.

    Args:
        rows: names and shares in [0, 1]. of: the value of a bar of the whole width; None: the greatest.
    """
    full = max((value for _, value in rows), default=0.0) if of is None else of
    left = min(_NAMES, 10 + _LETTER * max(len(name) for name, _ in rows))
    room = WIDTH - left - 58
    parts = []
    for number, (name, value) in enumerate(rows):
        y = 4 + 20 * number
        width = max(1.0, room * min(1.0, value / full)) if full > 0 else 1.0
        shown = escape(_short(name, (left - 8) / _LETTER))
        parts.append(f'<text x="{_n(left - 6)}" y="{y + 11}" text-anchor="end">{shown}</text>')
        parts.append(f'<rect x="{_n(left)}" y="{y}" width="{_n(width)}" height="14" rx="2" fill="var(--c0)"/>')
        parts.append(
            f'<text x="{_n(left + width + 5)}" y="{y + 11}" style="fill:var(--text)">{100 * value:.1f} %</text>'
        )
    return _svg(parts, label, height=8 + 20 * len(rows))


def scatter(
    groups: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    label: str,
    links: Sequence[tuple[tuple[float, float], tuple[float, float]]] = (),
) -> Html:
    """Points without axes; the first group's are circles, the second's crosses.

    Args:
        groups: a name to points x, y and what a pointer is told. links: lines from place to place.
    """
    places = [(x, y) for points in groups.values() for x, y, _ in points]
    (left, right), (bottom, top) = (_widened(min(axis), max(axis)) for axis in zip(*places, strict=True))
    scale = min((WIDTH - 16) / (right - left), (_TALLEST - 16) / (top - bottom))  # a map has one scale
    height = math.ceil((top - bottom) * scale) + 16

    def at(x: float, y: float) -> tuple[str, str]:
        return _n(WIDTH / 2 + (x - (left + right) / 2) * scale), _n(height / 2 - (y - (bottom + top) / 2) * scale)

    path = "".join("M{},{}L{},{}".format(*at(*start), *at(*stop)) for start, stop in links)
    parts = [f'<path d="{path}" stroke="var(--quiet)" stroke-width="0.4" opacity="0.35" fill="none"/>'] if path else []
    for number, points in enumerate(groups.values()):
        colour = f"var(--c{number % _COLOURS})"
        for x, y, text in points:
            a, b = at(x, y)
            tip = f"<title>{escape(text)}</title>"
            if number % 2:
                cross = f"M{a},{b}m-1.7,-1.7l3.4,3.4m0,-3.4l-3.4,3.4"
                parts.append(f'<path d="{cross}" stroke="{colour}" stroke-width="0.9">{tip}</path>')
            else:
                parts.append(f'<circle cx="{a}" cy="{b}" r="1.6" fill="{colour}">{tip}</circle>')
    return _svg(parts, label, height=height, legend=list(groups), marks=True)


def format_number(value: float) -> str:
    """As many digits as say something: 0.0123, 12.3, 12,300, 1.2e-05."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if size < 1e-3 or size >= 1e7:
        return f"{value:.3g}"
    if value == int(value):
        return f"{int(value):,}"
    text = f"{value:,.{max(0, 3 - math.floor(math.log10(size))) if size >= 1 else 4}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _axes(frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str) -> list[str]:
    parts = []
    floor = HEIGHT - _BOTTOM
    for value, text in zip(y_ticks, _tick_texts(y_ticks), strict=True):
        y = _n(frame.up(value))
        parts.append(f'<path class="axis" d="M{_LEFT},{y}H{_n(frame.right)}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{_n(frame.up(value) + 4)}" text-anchor="end">{text}</text>')
    for value, text in zip(x_ticks, _tick_texts(x_ticks), strict=True):
        parts.append(f'<text x="{_n(frame.across(value))}" y="{floor + 14}" text-anchor="middle">{text}</text>')
    middle = (_LEFT + frame.right) / 2
    parts.append(f'<text x="{_n(middle)}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _svg(
    parts: Sequence[str], label: str, *, height: int = HEIGHT, legend: Sequence[str] = (), marks: bool = False
) -> Html:
    drawn = "".join(parts)
    if legend:
        x, texts = 6.0 if marks else float(_LEFT), ""
        for number, name in enumerate(legend):
            colour = f"var(--c{number % _COLOURS})"
            if marks and number % 2:
                texts += f'<path d="M{_n(x + 2)},{height + 5}l7,7m0,-7l-7,7" stroke="{colour}" stroke-width="1.6"/>'
            elif marks:
                texts += f'<circle cx="{_n(x + 5)}" cy="{height + 8}" r="3.5" fill="{colour}"/>'
            else:
                dash = ' stroke-dasharray="5 3"' if number % 2 else ""
                texts += f'<path d="M{_n(x)},{height + 8}h14" stroke="{colour}" stroke-width="2"{dash}/>'
            texts += f'<text x="{_n(x + 18)}" y="{height + 12}">{escape(name)}</text>'
            x += 30 + _LETTER * len(name)
        drawn, height = drawn + texts, height + 20
    return Html(f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{drawn}</svg>')


def _scale(
    low: float, high: float, *, tight: bool = False, whole: bool = False, count: int = 5
) -> tuple[tuple[float, float], list[float]]:
    """A range that holds ``low`` and ``high``, and some ``count`` round numbers in it, or ``whole`` ones; ``tight``: the range
    ends where they do."""
    low, high = _widened(low, high)
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count + _HAIR)
    step = max(step, 1) if whole else step
    if tight:
        first, last = math.ceil(low / step - _HAIR), math.floor(high / step + _HAIR)
    else:
        first, last = math.floor(low / step + _HAIR), math.ceil(high / step - _HAIR)
        low, high = first * step, last * step
    return (low, high), [number * step for number in range(first, last + 1)]


def _widened(low: float, high: float) -> tuple[float, float]:
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    half = abs(high) * 0.1 or 0.5
    return low - half, high + half


def _tick_texts(ticks: Sequence[float]) -> list[str]:
    """All with as many decimals as their distance needs; thousands as k."""
    size = max(map(abs, ticks), default=0.0)
    step = min((b - a for a, b in zip(ticks, ticks[1:], strict=False)), default=size) or 1.0
    if size >= 1e7 or 0 < size < 1e-3:
        return [f"{value:.2g}" if value else "0" for value in ticks]
    if size >= 10_000:
        return [f"{value / 1000:.{0 if step >= 1000 else 1}f}k" if value else "0" for value in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{round(value, decimals) + 0.0:.{decimals}f}" for value in ticks]  # + 0.0: no -0


def _thinned(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    points = list(zip(x, y, strict=True))
    if len(points) <= _DRAWN:
        return points
    kept = {0, len(points) - 1}
    parts = _DRAWN // 2
    for part in range(parts):
        places = range(part * len(points) // parts, (part + 1) * len(points) // parts)
        kept |= {min(places, key=lambda place: y[place]), max(places, key=lambda place: y[place])}
    return [points[place] for place in sorted(kept)]


def _counted(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(max(bisect_right(edges, value) - 1, 0), len(counts) - 1)] += 1
    return counts


def _apart(places: Sequence[float], gap: float = 13.0) -> list[float]:
    """The places moved so far that labels there do not cover each other."""
    order = sorted(range(len(places)), key=lambda number: places[number])
    moved = list(places)
    for before, number in zip(order, order[1:], strict=False):
        moved[number] = max(moved[number], moved[before] + gap)
    over = moved[order[-1]] - (HEIGHT - _BOTTOM)
    if over > 0:  # back up, from the lowest label on
        limit = float(HEIGHT - _BOTTOM)
        for number in reversed(order):
            moved[number] = min(moved[number], limit)
            limit = moved[number] - gap
    return moved


def _short(name: str, letters: float) -> str:
    return name if len(name) <= letters else name[: int(letters) - 1] + "…"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
