"""The pages of search results, of hard negatives and of near-duplicates as a browser shows them, and their names."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from PIL import Image

from coder_plugin.html import breakable, data_uri, render
from tests.report.browser import assert_readable

KEY = "photos/holiday_in_the_mountains/IMG_20260714_181502-edited_version.final.jpeg"


PICTURE = data_uri(Image.new("RGB", (64, 48), "red"))


def page(**changes: Any) -> str:
    """A query of pictures, one by a picture among texts, an image with captions and negatives, a group with one to keep."""
    cards = [
        {
            "name": KEY,
            "link": f"file:///{KEY}" if number % 2 else None,
            "text": "a caption of some words " * 3,
            "rank": number + 1,
            "score": "0.300, similarity 0.500",
            "picture": None if number % 3 else PICTURE,
            "kept": False,
        }
        for number in range(7)
    ]
    kept = [{**card, "kept": not number, "link": None} for number, card in enumerate(cards)]
    boxes = [
        {"title": "a red circle", "pictures": True, "cards": cards, "note": ""},
        {"title": f"/somewhere/{KEY}", "picture": PICTURE, "pictures": False, "cards": cards, "note": ""},
        {"title": "a", "picture": None, "texts": ["a dog", "long " * 40], "pictures": True, "cards": [], "note": "none"},
        {"title": "1,007 images", "pictures": True, "cards": kept, "note": "and 1,000 more"},
    ]
    values = {"name": "index", "sizes": "7 images", "model": "run", "objective": "dcl", "boxes": boxes}
    values |= {"title": "Search of", "intro": ["2 groups. " * 9], "contents": True, "more": "and 3 more groups"}
    return render("cards.html", **{**values, **changes})


def test_a_browser_shows_the_page(browser: str, tmp_path: Path) -> None:
    assert [found["pictures"] for found in assert_readable(browser, page(), tmp_path, 390, 1280)] == [3 + 1 + 3] * 2


def test_names_break_at_their_parts_and_are_text() -> None:
    text = page()
    broken = "IMG_<wbr>20260714_<wbr>181502-<wbr>edited_<wbr>version<wbr>.final<wbr>.jpeg"
    assert text.count(f"photos/<wbr>holiday_<wbr>in_<wbr>the_<wbr>mountains/<wbr>{broken}") == 4 + 7 + 7 + 1 + 4 + 7
    links = 3 * 2 + 3  # three of the hits are linked: the picture and the name of the first query, the name of the second
    assert text.count(f'<a href="file:///{KEY}" rel="noreferrer">') == links
    assert html.unescape(text.replace("<wbr>", "")).count(KEY) == 31 + links  # the query picture has its name
    evil = '<script>/alert_(1)</script>"\'&'
    assert "<script" not in breakable(evil) and html.unescape(breakable(evil).replace("<wbr>", "")) == evil
    assert breakable("torch 2.9.1, x-y", 20) == "torch 2.9.1, x-y"
