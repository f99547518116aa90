"""Charts: where marks lie, what they say, and numbers that are hard to draw."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from coder_plugin.report import charts
from coder_plugin.report.charts import Series, bars, format_number, histogram, lines, scatter


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def points(svg: str) -> list[list[tuple[float, float]]]:
    found = [each.attrib["points"].split() for each in parsed(svg).iter("polyline")]
    return [[tuple(map(float, point.split(","))) for point in line] for line in found]


def test_lines_lie_where_their_numbers_are() -> None:
    svg = lines([Series("a", [0, 10, 20], [1.0, 3.0, 2.0])], label="x")
    [line] = points(svg)
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x0 == charts._LEFT and x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.3) and y1 < y2 < y0  # up is less
    titles = [title.text for title in parsed(svg).iter("title")]
    assert titles == ["1 at step 0", "3 at step 10", "2 at step 20"]
    ticks = [text.text for text in parsed(svg).iter("text")]
    assert {"1.0", "2.0", "3.0", "0", "10", "20", "step"} <= set(ticks)


def test_several_lines_are_named_apart() -> None:
    svg = lines([Series(f"R@{k}", [0, 1], [k, 5.0 + k / 100]) for k in (1, 5, 10)], label="x", zero=True)
    names = {
        each.text: float(each.attrib["y"]) for each in parsed(svg).iter("text") if (each.text or "").startswith("R@")
    }
    heights = sorted(names.values())
    assert len(names) == 3 and all(b - a >= 12.9 for a, b in zip(heights, heights[1:], strict=False))
    assert all("var(--c" in each.attrib["stroke"] for each in parsed(svg).iter("polyline"))


@pytest.mark.parametrize(
    "y", [[0.5, 0.7], [1e-6, 9e-6], [123456.0, 987654.0], [-0.000123, 0.000456], [0.0, 1e12], [99999.0, -99999.0]]
)
def test_no_text_leaves_its_chart(y: list[float]) -> None:
    """With the widest common fonts: 7 of 11 pixels a digit, 7.6 a bold letter."""
    names = ["R@10", "a name of many letters that is much longer than the margin", "R@1"]
    for x in ([0, 1], [0, 100_000], [123_456, 9_999_999]):
        for series in ([Series("a", x, y)], [Series(name, x, y) for name in names]):
            for each in parsed(lines(series, label="x")).iter("text"):
                bold = "600" in each.attrib.get("style", "")
                width = len(each.text or "") * (7.6 if bold else 6.9)
                left = float(each.attrib["x"]) - {"middle": width / 2, "end": width}.get(each.attrib.get("text-anchor"), 0)
                assert left >= -0.5 and left + width <= charts.WIDTH + 0.5, each.text


def test_lines_of_runs_keep_their_colours_and_end_with_their_labels() -> None:
    runs = [Series(f"run {n}", [0, 4 + n], [n, n + 1.0], colour=n, label=str(n + 1)) for n in (1, 9, 17)]
    root = parsed(lines(runs, label="x"))
    strokes = [(each.attrib["stroke"], each.attrib.get("stroke-dasharray")) for each in root.iter("polyline")]
    assert [colour for colour, _ in strokes] == ["var(--c1)"] * 3 and len({dash for _, dash in strokes}) == 3
    labels = {each.text: float(each.attrib["x"]) for each in root.iter("text") if each.text in ("2", "10", "18")}
    assert labels["2"] < labels["10"] < labels["18"]  # where each line ends
    titles = [each.text for each in root.iter("title")]
    assert "run 9: 10 at step 13" in titles
    [alone] = [each for each in parsed(lines(runs[:1], label="x")).iter("text") if each.attrib.get("style")]
    assert alone.text == "2"  # a single line of several charts is labelled too


def test_a_long_line_keeps_its_extremes_and_ends() -> None:
    y = [0.0] * 5000
    y[1234], y[3210] = 9.0, -7.0
    kept = charts._downsampled(range(5000), y)
    assert len(kept) <= 2 * charts._MAX_POINTS and (1234, 9.0) in kept and (3210, -7.0) in kept
    assert kept[0] == (0, 0.0) and kept[-1] == (4999, 0.0) and kept == sorted(kept)


@pytest.mark.parametrize("y", [[0.5], [0.5, 0.5, 0.5], [0.0, 0.0], [1e-9, 2e-9], [-3e6, 4e6], [1e12, 1e12 + 1]])
def test_hard_numbers_are_drawn(y: list[float]) -> None:
    svg = lines([Series("a", list(range(len(y))), y)], label="x")
    assert "nan" not in svg and "inf" not in svg
    for line in points(svg):
        assert all(0 <= a <= charts.WIDTH and 0 <= b <= charts.HEIGHT for a, b in line)
    assert parsed(svg).find("circle") is not None


def test_a_histogram_counts_everything_once() -> None:
    values = [0.0, 0.1, 0.1, 0.5, 1.0, 7.0]
    svg = histogram({"images": values, "texts": [0.2]}, label="x", x_label="v", bins=10, top=1.0)
    counted = re.findall(r"<title>(\w+): (\d+) from", svg)
    assert sum(int(count) for name, count in counted if name == "images") == len(values)
    assert sum(int(count) for name, count in counted if name == "texts") == 1
    assert "images: 2 from 0.9 up" in svg  # the greatest in the last bin
    assert "texts: 1 from 0.2 to 0.3" in svg
    capped = histogram({"sizes": [1, 2, 3, 1000]}, label="x", x_label="pairs", top=10, integers=True)
    assert "sizes: 1 from 10 up" in capped and "up" not in histogram({"a": [1, 9]}, label="x", x_label="v", top=9)
    legend = [text.text for text in parsed(svg).iter("text")]
    assert "images" in legend and "texts" in legend and svg.count("stroke-dasharray") == 2  # not by colour alone


def test_integers_have_equal_bins() -> None:
    svg = histogram({"ages": [age for age in range(64) for _ in range(3)]}, label="x", x_label="steps", integers=True)
    assert [int(count) for count in re.findall(r"<title>ages: (\d+) from", svg)] == [9] * 21 + [3]
    assert "ages: 5 from 0 to 0" in histogram({"ages": [0] * 5}, label="x", x_label="steps", integers=True)
    few = parsed(histogram({"ages": [0, 0, 1]}, label="x", x_label="steps", integers=True))
    along = [text.text for text in few.iter("text") if text.attrib["y"] == str(charts.HEIGHT - charts._BOTTOM + 14)]
    assert along == ["0", "1"]  # no tick between two integers


def test_rounding_is_no_spread() -> None:
    svg = histogram({"norms": [1.0, 1.0 + 1e-7]}, label="x", x_label="norm", min_range=0.02)
    ticks = [text.text for text in parsed(svg).iter("text")]
    assert {"0.995", "1.000", "1.005", "0", "1", "2"} <= set(ticks)
    assert "norms: 2 from" in svg


def test_bars_are_as_long_as_their_shares() -> None:
    svg = bars([("dog", 0.5), ("a name that is much too long to be written whole", 0.25)], label="x")
    widths = [float(each.attrib["width"]) for each in parsed(svg).iter("rect")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    texts = [text.text for text in parsed(svg).iter("text")]
    assert "50.0 %" in texts and "25.0 %" in texts and any(text.endswith("…") for text in texts)


def test_a_map_has_one_scale() -> None:
    places = [(0.0, 0.0, "p"), (10.0, 0.0, "q"), (0.0, 10.0, "r")]
    svg = scatter({"images": places, "captions": [(5.0, 5.0, "s")]}, label="x", links=[((0.0, 0.0), (5.0, 5.0))])
    circles = [each for each in parsed(svg).iter("circle") if each.find("title") is not None]
    (ax, ay), (bx, by), (cx, cy) = ((float(each.attrib["cx"]), float(each.attrib["cy"])) for each in circles)
    assert bx - ax == pytest.approx(ay - cy, abs=0.2) and ay == by and ax == cx
    assert [title.text for title in parsed(svg).iter("title")] == ["p", "q", "r", "s"]
    assert len([each for each in parsed(svg).iter("path") if each.find("title") is not None]) == 1  # a cross


def test_texts_are_escaped() -> None:
    evil = '<script>alert("&")</script>'
    for svg in (
        lines([Series(evil, [0, 1], [0, 1]), Series("b", [0, 1], [0, 1])], label=evil, x_label=evil),
        histogram({evil: [1.0], "b": [2.0]}, label=evil, x_label=evil),
        bars([(evil, 0.5)], label=evil),
        scatter({evil: [(0.0, 1.0, evil), (1.0, 0.0, evil)]}, label=evil),
    ):
        assert "<script" not in svg
        assert parsed(svg).attrib["aria-label"] == evil


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0123, "0.0123"),
        (12.3, "12.3"),
        (12300, "12,300"),
        (1.2e-5, "1.2e-05"),
        (266.34, "266.3"),
        (-0.22, "-0.22"),
    ],
)
def test_numbers_have_the_digits_that_say_something(value: float, text: str) -> None:
    assert format_number(value) == text
