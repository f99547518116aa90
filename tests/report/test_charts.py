"""Charts: what they draw, in which colours, and numbers and names that are hard to draw."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from coder_plugin.report import charts
from coder_plugin.report.charts import Series, histogram, lines


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of the charts that a test draws."""
    figures: list[Any] = []
    make = charts.new_figure
    monkeypatch.setattr(charts, "new_figure", lambda *size: figures.append(make(*size)) or figures[-1])
    return figures


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in parsed(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_lines_are_the_numbers(drawn: list[Any]) -> None:
    svg = lines([Series("a", [0, 10, 20], [1.0, 3.0, 2.0]), Series("b", [0, 5], [7.0, 8.0], colour=9)], zero=True)
    [figure] = drawn
    [axes] = figure.axes
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] == [
        ([0, 10, 20], [1, 3, 2]), ([0, 5], [7, 8])
    ]  # fmt: skip
    assert axes.get_ylim()[0] <= 0 and {"a", "b", "step"} <= set(texts(svg))
    assert axes.lines[1].get_linestyle() == "--"  # the tenth run has the second's colour, and dashes
    assert "a" not in texts(lines([Series("a", [0, 1], [1.0, 3.0])]))  # a single line needs no legend


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "y", [[0.5], [0.0, 0.0], [1e-9, 2e-9], [1e12, 1e12 + 1], [1e308, -1e308, 1.0], [float("nan"), float("inf"), 1.0], [1e308]]
)
def test_hard_numbers_are_drawn(y: list[float]) -> None:
    for svg in (lines([Series("a", list(range(len(y))), y)]), lines([Series("a", [1e308] * len(y), y)], zero=True)):
        assert parsed(svg) is not None and not re.search(r"\b(nan|inf)\b", svg)


@pytest.mark.filterwarnings("error")
def test_a_histogram_counts_everything_once(drawn: list[Any]) -> None:
    histogram([3, 3, 4, 90], x_label="steps")
    [patch] = drawn[0].axes[0].patches
    assert sum(patch.get_data().values) == 4 and patch.get_data().values.tolist()[:2] == [3, 0]
    assert patch.get_data().edges[:2].tolist() == [2.5, 5.5]
    assert not {"0.5", "0.50", "0.25"} & {*texts(histogram([0, 0], x_label="steps"))}


def test_texts_are_escaped_and_never_mathematics() -> None:
    evil = "_$<script>&--></"
    svg = lines([Series(evil, [0, 1], [1, 2]), Series("$\\frac$", [0, 1], [1, 2])], x_label='"<b>$x')
    assert "<script" not in svg and "<b>" not in svg and "<!--" not in svg
    assert {" _$<script>&--…", "$\\frac$", '"<b>$x'} <= set(texts(svg))
    for address in re.findall(r'(?:href|src)="([^"]*)"', svg):
        assert address.startswith("#")
