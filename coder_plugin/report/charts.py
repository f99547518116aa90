"""Small charts as inline SVG: lines, bars, histograms, points.

Colours are CSS variables of ``base.html``, so that charts follow its light and dark theme. Lines and groups have labels, so
that no chart depends on colour alone. A chart is 340 units wide, about the width of a phone, so that its texts stay readable.
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
_MAX_MAP_HEIGHT = 300
_LEFT, _TOP, _BOTTOM = 44, 10, 34
_LETTER, _BOLD, _DIGIT = 6.4, 7.6, 7.0  # widths in an 11 px font, a wide one
_MAX_LABEL_WIDTH = 130
_MAX_POINTS = 240  # of a line; see _downsampled
_MAX_TOOLTIPS = 40  # of a line
_COLOURS = 8
_ROUNDING = 1e-5  # tolerance, as a fraction of the distance between ticks


@dataclass(frozen=True)
class Series:
    """A line: its name, its points in the order of ``x``, and where lines of several charts belong together, the number of its
    colour (from 0) and the short label at its end."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int | None = None
    label: str = ""


class _Frame(NamedTuple):
    """Maps values to the chart's units. ``x`` and ``y`` are the axes' ranges, ``left`` and ``right`` the plot's edges."""

    x: tuple[float, float]
    y: tuple[float, float]
    left: float
    right: float

    def to_x(self, value: float) -> float:
        low, high = self.x
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def to_y(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _BOTTOM - _TOP)


def lines(series: Sequence[Series], *, label: str, x_label: str = "step", zero: bool = False) -> Html:
    """Draw lines over a common axis. Several lines, and lines with a colour of their own, are labelled at their ends; a line of
    one point is a dot.

    Args:
        series: one or more lines, each with one or more finite points.
        label: description of the chart for screen readers.
        x_label: name of the horizontal axis.
        zero: include 0 in the vertical axis.
    """
    values = [value for each in series for value in each.y]
    low, high = min(values), max(values)
    y, ticks = _scale(min(low, 0.0) if zero else low, high)
    x, x_ticks = _scale(min(each.x[0] for each in series), max(each.x[-1] for each in series), tight=True, count=4)
    labelled = len(series) > 1 or series[0].colour is not None
    room = 12 + (_BOLD * max(len(each.label or each.name) for each in series) if labelled else 0)
    frame = _Frame(x, y, _left(ticks), WIDTH - min(room, _MAX_LABEL_WIDTH))
    parts = _axes(frame, x_ticks, ticks, x_label)
    ends = _spread([frame.to_y(each.y[-1]) for each in series])
    for number, (each, end) in enumerate(zip(series, ends, strict=True)):
        number = number if each.colour is None else each.colour
        colour = line_colour(number)
        points = _downsampled(each.x, each.y)
        path = " ".join(f"{_n(frame.to_x(a))},{_n(frame.to_y(b))}" for a, b in points)
        if len(points) > 1:
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.7" stroke-linejoin="round"'
                f"{line_dash(number)}/>"
            )
        dots = points[:: max(1, math.ceil(len(points) / _MAX_TOOLTIPS))]
        dot_radius = 2.2 if len(points) <= 12 else 0
        for a, b in dots if dots[-1] == points[-1] else [*dots, points[-1]]:
            prefix = f"{each.name}: " if labelled else ""
            tip = escape(f"{prefix}{format_number(b)} at {x_label} {format_number(a)}")
            position = f'cx="{_n(frame.to_x(a))}" cy="{_n(frame.to_y(b))}"'
            if dot_radius:
                parts.append(f'<circle {position} r="{dot_radius}" fill="{colour}"/>')
            parts.append(f'<circle {position} r="6" fill="transparent"><title>{tip}</title></circle>')
        if labelled:
            position = f'x="{_n(frame.to_x(each.x[-1]) + 6)}" y="{_n(end + 4)}" style="fill:{colour};font-weight:600"'
            parts.append(f"<text {position}>{escape(_short(each.label or each.name, (_MAX_LABEL_WIDTH - 12) / _BOLD))}</text>")
    return _svg(parts, label)


def line_colour(number: int) -> str:
    """The colour of a page's line with this number, from 0, as a value of CSS."""
    return f"var(--c{number % _COLOURS})"


def line_dash(number: int) -> str:
    """The dashes of that line, as an attribute of SVG: lines of one colour differ in them."""
    dashes = ("", "7 3", "2 3", "9 3 2 3")
    dash = dashes[number // _COLOURS % len(dashes)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def histogram(
    groups: Mapping[str, Sequence[float]],
    *,
    label: str,
    x_label: str,
    bins: int = 31,  # odd, so that nearly equal values lie in the middle of a bin
    min_range: float = 0.0,
    top: float | None = None,
    integers: bool = False,
) -> Html:
    """Draw histograms of one or more groups on top of each other, with equal bins over the range of all groups.

    Args:
        groups: one or more finite values by the group's name.
        label: description of the chart for screen readers.
        x_label: name of the horizontal axis.
        bins: number of bins.
        min_range: the least width of the range, so that rounding errors do not look like a spread.
        top: end of the range; greater values count in the last bin, whose tooltip says "up".
        integers: the values are integers, and each bin covers the same number of them.
    """
    all_values = [value for values in groups.values() for value in values]
    low, high = min(all_values), max(all_values)
    overflows = top is not None and high > top
    if top is not None:
        high = min(high, top)
    if integers:
        width = math.ceil((high - low + 1) / bins)
        bins = math.ceil((high - low + 1) / width)
        low, high = low - 0.5, low - 0.5 + bins * width
    elif high - low < min_range or high == low:
        middle, half = (low + high) / 2, min_range / 2 or max(abs(high) * 0.05, 1e-3)
        low, high = middle - half, middle + half
    x, x_ticks = _scale(low, high, tight=True, count=5, integers=integers)
    edges = [low + (high - low) * number / bins for number in range(bins + 1)]
    counts = {name: _bin_counts(values, edges) for name, values in groups.items()}
    y, ticks = _scale(0.0, float(max(max(each) for each in counts.values())), count=4, integers=True)
    frame = _Frame(x, y, _left(ticks), WIDTH - 12)
    parts = _axes(frame, x_ticks, ticks, x_label)
    for number, (name, each) in enumerate(counts.items()):
        colour = f"var(--c{number % _COLOURS})"
        path = f"M{_n(frame.to_x(edges[0]))},{_n(frame.to_y(0))}"
        for nth, (count, start, stop) in enumerate(zip(each, edges, edges[1:], strict=False), 1):
            path += f"V{_n(frame.to_y(count))}H{_n(frame.to_x(stop))}"
            position = f'x="{_n(frame.to_x(start))}" y="{_TOP}" width="{_n(frame.to_x(stop) - frame.to_x(start))}"'
            first, last = (start + 0.5, stop - 0.5) if integers else (start, stop)
            until = "up" if overflows and nth == bins else f"to {format_number(last)}"
            tip = escape(f"{name}: {count} from {format_number(first)} {until}")
            if count:
                size = f'height="{HEIGHT - _TOP - _BOTTOM}" fill="transparent"'
                parts.append(f"<rect {position} {size}><title>{tip}</title></rect>")
        dash = ' stroke-dasharray="5 3"' if number % 2 else ""
        style = f'fill="{colour}" fill-opacity="0.22" stroke="{colour}" stroke-width="1.5"{dash}'
        parts.append(f'<path d="{path}V{_n(frame.to_y(0))}" {style} pointer-events="none"/>')
    return _svg(parts, label, legend=list(groups) if len(groups) > 1 else [])


def bars(rows: Sequence[tuple[str, float]], *, label: str, full_width: float | None = None) -> Html:
    """Draw horizontal bars, each with its name on the left and its percentage on the right.

    Args:
        rows: names and fractions in [0, 1].
        label: description of the chart for screen readers.
        full_width: the fraction that fills the chart's width; None: the greatest of the rows.
    """
    full = max((value for _, value in rows), default=0.0) if full_width is None else full_width
    left = min(_MAX_LABEL_WIDTH, 10 + _LETTER * max(len(name) for name, _ in rows))
    room = WIDTH - left - 58
    parts = []
    for number, (name, value) in enumerate(rows):
        y = 4 + 20 * number
        width = max(1.0, room * min(1.0, value / full)) if full > 0 else 1.0
        text = escape(_short(name, (left - 8) / _LETTER))
        parts.append(f'<text x="{_n(left - 6)}" y="{y + 11}" text-anchor="end">{text}</text>')
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
    """Draw points without axes: circles for the first group, crosses for the second.

    Args:
        groups: points by the group's name, each with x, y and the text of its tooltip.
        label: description of the chart for screen readers.
        links: lines to draw, each from one point to another.
    """
    coordinates = [(x, y) for points in groups.values() for x, y, _ in points]
    (left, right), (bottom, top) = (_widened(min(axis), max(axis)) for axis in zip(*coordinates, strict=True))
    scale = min((WIDTH - 16) / (right - left), (_MAX_MAP_HEIGHT - 16) / (top - bottom))  # the same for both axes
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
    """Format a number with about four significant digits.

    Example:
        >>> format_number(266.34), format_number(12300), format_number(1.2e-5)
        ('266.3', '12,300', '1.2e-05')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if size < 1e-3 or size >= 1e7:
        return f"{value:.3g}"
    if value == int(value):
        return f"{int(value):,}"
    text = f"{value:,.{max(0, 3 - math.floor(math.log10(size))) if size >= 1 else 4}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _left(ticks: Sequence[float]) -> float:
    """The plot's left edge, with room for the labels of the vertical axis."""
    return max(float(_LEFT), 8 + _DIGIT * max(map(len, _tick_texts(ticks)), default=0))


def _axes(frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str) -> list[str]:
    parts = []
    floor = HEIGHT - _BOTTOM
    for value, text in zip(y_ticks, _tick_texts(y_ticks), strict=True):
        y = _n(frame.to_y(value))
        parts.append(f'<path class="axis" d="M{_n(frame.left)},{y}H{_n(frame.right)}"/>')
        parts.append(f'<text x="{_n(frame.left - 6)}" y="{_n(frame.to_y(value) + 4)}" text-anchor="end">{text}</text>')
    for value, text in zip(x_ticks, _tick_texts(x_ticks), strict=True):
        half = len(text) * _DIGIT / 2
        x = min(frame.to_x(value), WIDTH - 1 - half)
        parts.append(f'<text x="{_n(x)}" y="{floor + 14}" text-anchor="middle">{text}</text>')
    middle = (frame.left + frame.right) / 2
    parts.append(f'<text x="{_n(middle)}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _svg(
    parts: Sequence[str], label: str, *, height: int = HEIGHT, legend: Sequence[str] = (), marks: bool = False
) -> Html:
    content = "".join(parts)
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
        content, height = content + texts, height + 20
    return Html(f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{content}</svg>')


def _scale(
    low: float, high: float, *, tight: bool = False, integers: bool = False, count: int = 5
) -> tuple[tuple[float, float], list[float]]:
    """An axis: its range, which covers ``low`` to ``high``, and about ``count`` ticks at round numbers.

    Args:
        tight: end the range at ``low`` and ``high`` instead of at ticks.
        integers: ticks at integers only.
    """
    low, high = _widened(low, high)
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count + _ROUNDING)
    step = max(step, 1) if integers else step
    if tight:
        first, last = math.ceil(low / step - _ROUNDING), math.floor(high / step + _ROUNDING)
    else:
        first, last = math.floor(low / step + _ROUNDING), math.ceil(high / step - _ROUNDING)
        low, high = first * step, last * step
    return (low, high), [number * step for number in range(first, last + 1)]


def _widened(low: float, high: float) -> tuple[float, float]:
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    half = abs(high) * 0.1 or 0.5
    return low - half, high + half


def _tick_texts(ticks: Sequence[float]) -> list[str]:
    """The ticks' labels: with as many decimals as their distance needs, and thousands as k."""
    size = max(map(abs, ticks), default=0.0)
    step = min((b - a for a, b in zip(ticks, ticks[1:], strict=False)), default=size) or 1.0
    if size >= 1e7 or 0 < size < 1e-3:
        return [f"{value:.2g}" if value else "0" for value in ticks]
    if size >= 10_000:
        return [f"{value / 1000:.{0 if step >= 1000 else 1}f}k" if value else "0" for value in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{round(value, decimals) + 0.0:.{decimals}f}" for value in ticks]  # + 0.0 turns -0.0 into 0.0


def _downsampled(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """The points of a line; of a long line its ends, and the lowest and highest point of each of its equal parts."""
    points = list(zip(x, y, strict=True))
    if len(points) <= _MAX_POINTS:
        return points
    selected = {0, len(points) - 1}
    parts = _MAX_POINTS // 2
    for part in range(parts):
        indices = range(part * len(points) // parts, (part + 1) * len(points) // parts)
        selected |= {min(indices, key=lambda index: y[index]), max(indices, key=lambda index: y[index])}
    return [points[index] for index in sorted(selected)]


def _bin_counts(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(max(bisect_right(edges, value) - 1, 0), len(counts) - 1)] += 1
    return counts


def _spread(heights: Sequence[float], gap: float = 13.0) -> list[float]:
    """The heights of labels, moved so that they do not overlap."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    moved = list(heights)
    for before, number in zip(order, order[1:], strict=False):
        moved[number] = max(moved[number], moved[before] + gap)
    over = moved[order[-1]] - (HEIGHT - _BOTTOM)
    if over > 0:  # move up again, starting with the lowest label
        limit = float(HEIGHT - _BOTTOM)
        for number in reversed(order):
            moved[number] = min(moved[number], limit)
            limit = moved[number] - gap
    return moved


def _short(name: str, letters: float) -> str:
    return name if len(name) <= letters else name[: int(letters) - 1] + "…"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
