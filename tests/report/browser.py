"""Pages as a browser shows them, for the tests that have one."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

#: A script that measures a page: what sticks out, what is cut, and how many pictures and charts it has.
_LOOK = """<script>addEventListener("load", () => {
  const width = document.documentElement.clientWidth, all = [...document.querySelectorAll("body *")];
  const inside = (text) => {
    const box = text.getBoundingClientRect(), chart = text.ownerSVGElement.getBoundingClientRect();
    return box.left >= chart.left - 8 && box.right <= chart.right + 8 && box.top >= chart.top - 1
      && box.bottom <= chart.bottom + 1;
  };
  const wraps = [...document.querySelectorAll(".wrap")];
  const measure = () => { frameElement.dataset.found = JSON.stringify({
    width: innerWidth,
    scrolled: document.documentElement.scrollWidth,
    wide: all.filter(e => !e.closest(".wrap, pre, svg") && e.getBoundingClientRect().right > width + 1)
      .map(e => e.outerHTML.slice(0, 120)),
    cut_tables: wraps.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.trim().slice(0, 80)),
    hints: wraps.map(e => parseFloat(getComputedStyle(e, "::before").height)),
    outside: [...document.querySelectorAll("svg text")].filter(e => !inside(e)).map(e => e.textContent),
    colours: [...new Set([document.body, ...document.querySelectorAll("svg text")].map(
      e => getComputedStyle(e)[e === document.body ? "backgroundColor" : "fill"]))],
    broken: [...document.images].filter(e => !e.naturalWidth).length,
    pictures: document.images.length,
    charts: document.querySelectorAll("svg").length,
  }); };
  // after two frames, in which the timelines of scrolling begin; a busy machine may draw none in time
  requestAnimationFrame(() => requestAnimationFrame(measure));
  setTimeout(measure, 2000);
});</script></body>"""


def browse(browser: str, folder: Path, *flags: str) -> str:
    """Run a browser without a window; returns its standard output."""
    own = f"--user-data-dir={folder / 'profile'}"
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", own]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, encoding="utf-8", errors="replace")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def look(browser: str, text: str, folder: Path, *widths: int, flags: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What a page is like at each width, in pixels: in frames, because windows have a least width."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # which lets no script run
    text = text.replace("<details", "<details open")
    inner = html.escape(text.replace("</body>", _LOOK))
    copy = folder / "copy.html"
    frames = [f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{inner}"></iframe>' for width in widths]
    copy.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body>{"".join(frames)}', "utf-8")
    dom = browse(browser, folder, "--virtual-time-budget=3000", *flags, "--dump-dom", copy.as_uri())
    found = [json.loads(html.unescape(each)) for each in re.findall(r'data-found="([^"]*)"', dom)]
    assert [each["width"] for each in found] == [*widths]
    return found


def assert_readable(browser: str, text: str, folder: Path, *widths: int) -> list[dict[str, Any]]:
    """Nothing wider than the page, no label outside its chart, no picture broken; returns what :func:`look` found."""
    found = look(browser, text, folder, *widths)
    for each in found:
        assert each["scrolled"] <= each["width"]
        assert each["wide"] == [] and each["outside"] == [] and each["broken"] == 0
    return found
