"""The pages of search results, of hard negatives and of near-duplicates as a browser shows them, and their names."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coder_plugin.html import breakable, data_uri, render
from tests.report.browser import assert_readable

KEY = "photos/holiday_in_the_mountains/IMG_20260714_181502-edited_version.final.jpeg"


def page(**changes: Any) -> str:
    picture = data_uri(Image.new("RGB", (64, 48), "red"))
    hits = [
        {
            "place": KEY,
            "link": f"file:///{KEY}" if number % 2 else None,
            "caption": "a caption of some words " * 3,
            "score": "0.300",
            "picture": None if number % 3 else picture,
        }
        for number in range(7)
    ]
    queries = [
        {"name": "a red circle", "picture": None, "texts": False, "hits": hits},
        {"name": f"/somewhere/{KEY}", "picture": picture, "texts": True, "hits": hits},
    ]
    values = {"name": "index", "sizes": "7 images", "model": "run", "objective": "dcl", "queries": queries}
    return render("search.html", **{**values, **changes})


def pictures(browser: str, text: str, folder: Path) -> list[int]:
    """How many a phone shows, and a wide screen."""
    return [found["pictures"] for found in assert_readable(browser, text, folder, 390, 1280)]


def test_a_browser_shows_the_page(browser: str, tmp_path: Path) -> None:
    assert pictures(browser, page(), tmp_path) == [4, 4]


@pytest.mark.slow
def test_a_browser_shows_negatives(browser: str, tmp_path: Path) -> None:
    picture = data_uri(Image.new("RGB", (64, 48), "red"))
    numbers = {"score": "0.300", "similarity": "0.500", "rank": 12}
    negatives = [
        {"key": KEY, "text": "a caption " * 6, "picture": picture if number else None, **numbers} for number in range(7)
    ]
    image = {"key": f"/somewhere/{KEY}", "captions": ["a dog", "a cat"], "positive": "a long caption " * 9, "score": "0.3"}
    images = [{**image, "picture": picture, "negatives": negatives}, {**image, "picture": None, "negatives": []}]
    shown = render("negatives.html", name="index", sizes="7 images", model="run", objective="dcl", images=images)
    assert pictures(browser, shown, tmp_path) == [7, 7]
    assert shown.count("no caption passes") == 1


@pytest.mark.slow
def test_a_browser_shows_near_duplicates(browser: str, tmp_path: Path) -> None:
    picture = data_uri(Image.new("RGB", (64, 48), "red"))
    images = [{"key": KEY, "picture": picture if number % 3 else None, "similarity": "0.9876"} for number in range(7)]
    groups = [{"size": "7", "more": 0, "images": images}, {"size": "1,007", "more": 1000, "images": images}]
    values = {"name": "index", "sizes": "7 images", "model": "run", "objective": "dcl", "summary": "2 groups. " * 9, "more": 3}
    assert pictures(browser, render("duplicates.html", groups=groups, **values), tmp_path) == [8, 8]


def test_names_break_at_their_parts_and_are_text() -> None:
    text = page()
    broken = "IMG_<wbr>20260714_<wbr>181502-<wbr>edited_<wbr>version<wbr>.final<wbr>.jpeg"
    assert text.count(f"photos/<wbr>holiday_<wbr>in_<wbr>the_<wbr>mountains/<wbr>{broken}") == 4 + 7 + 7 + 1
    links = 3 * 2 + 3  # three of the hits are linked: the picture and the name of the first query, the name of the second
    assert text.count(f'<a href="file:///{KEY}" rel="noreferrer">') == links
    assert html.unescape(text.replace("<wbr>", "")).count(KEY) == 19 + links
    evil = '<script>/alert_(1)</script>"\'&'
    assert "<script" not in breakable(evil) and html.unescape(breakable(evil).replace("<wbr>", "")) == evil
    assert breakable("torch 2.9.1, x-y", 20) == "torch 2.9.1, x-y"
