"""What README and docs show: pages, their blocks, and which of them are not run.

A block that cannot run is preceded by a line ``<!-- not run: REASON -->``, in the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block: its page, line, language, text, and why it is not run (None: it is)."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in these languages, in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start("text")].count("\n"), found["language"], found["text"], found["reason"])
        for found in _FENCE.finditer(text)
        if found["language"] in languages
    ]


def prose(page: Path) -> str:
    """The text of a page without its blocks, whose lines are empty: line numbers stay."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)


def needs_a_run(page: Path) -> bool:
    """Whether the Python of a page names something trained or indexed."""
    names = re.compile(r"my-run|my-model|scenes-model|\.index|f30k_precomp")
    return any(names.search(block.text) for block in blocks(page, "python") if block.reason is None)
