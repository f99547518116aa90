"""Where a found picture is, and what a page links: files of this machine and web addresses, whatever an index says."""

from __future__ import annotations

import html

import pytest

from coder_plugin.html import render
from coder_plugin.index.place import link, place
from coder_plugin.index.records import Image


def image(path: str | None, member: str | None = None) -> Image:
    return Image(row=0, key="the/key.jpg", image_id=1, path=path, member=member)


@pytest.mark.parametrize(
    "path, member, shown, address",
    [
        ("/data/a.jpg", None, "/data/a.jpg", "file:///data/a.jpg"),
        ("/data/ä #1?.jpg", None, "/data/ä #1?.jpg", "file:///data/%C3%A4%20%231%3F.jpg"),
        ("/data/0.tar", "a/b.jpg", "/data/0.tar:a/b.jpg", None),
        (None, None, "the/key.jpg", None),
        ("https://example.org/a.jpg", None, "https://example.org/a.jpg", "https://example.org/a.jpg"),
        ("s3://bucket/a.jpg", None, "s3://bucket/a.jpg", None),
        ("javascript:alert(1)", None, "javascript:alert(1)", None),
        ("data:text/html,<script>", None, "data:text/html,<script>", None),
        ("//server/share/a.jpg", None, "//server/share/a.jpg", None),
        ("\\\\server\\share\\a.jpg", None, "\\\\server\\share\\a.jpg", None),
        ("photos/a.jpg", None, "photos/a.jpg", None),
        ("/data/\x1b[31m.jpg", None, "/data/\x1b[31m.jpg", None),
        ("/data/a\nb.jpg", None, "/data/a\nb.jpg", None),
        ("/data/" + "a" * 5000, None, "/data/" + "a" * 5000, None),
        ("", None, "", None),
    ],
)
def test_places_and_links(path: str | None, member: str | None, shown: str, address: str | None) -> None:
    assert place(image(path, member)) == shown and link(image(path, member)) == address


@pytest.mark.parametrize("path", ['/x"><script>alert(1)</script>.jpg', "/x' onmouseover='alert(1).jpg", "https://e.org/\"><b>"])
def test_a_page_escapes_them(path: str) -> None:
    hit = {"place": place(image(path)), "link": link(image(path)), "caption": "c", "score": "1", "picture": None}
    query = {"name": "q", "picture": None, "texts": False, "hits": [hit]}
    page = render("search.html", name="i", sizes="", model="m", objective="", queries=[query])
    assert "<script" not in page and "<b>" not in page.replace("<b>1</b>", "") and "onmouseover='" not in page
    assert html.unescape(page.replace("<wbr>", "")).count(path) >= 2
