"""The documentation site is built without a warning, loads nothing from other servers, and renders pages as GitHub does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation import prose

pytest.importorskip("mkdocs")
pytestmark = pytest.mark.slow  # the workflow builds the site in a job of its own

ROOT = Path(__file__).parents[1]
#: What a browser fetches for a page: scripts, pictures, style sheets.
LOADED = re.compile(r'<(?:script|img|iframe|source)[^>]+src="([^"]+)"|<link[^>]+href="([^"]+)"|url\(([^)]+)\)')
PAGES = sorted(path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def article(site: Path, page: Path) -> str:
    """The HTML of a page's text, without navigation."""
    html = (site / page.with_suffix(".html")).read_text(encoding="utf-8")
    return html.partition('<article class="md-content__inner')[2].partition("</article>")[0]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 30
    for path in files:
        loaded = LOADED.findall(path.read_text())
        outside = [url for urls in loaded for url in urls if re.match(r"[\"']?(https?:)?//", url)]
        assert not outside, f"{path.name}: {outside}"


def test_pages_say_which_version_and_what_to_import(site: Path) -> None:
    import coder_plugin

    assert f"<title>coder_plugin {coder_plugin.__version__}</title>" in (site / "index.html").read_text()
    main, plugins = article(site, Path("api/main.md")), article(site, Path("api/plugins.md"))
    assert all(f"<code>from coder_plugin import {name}</code>" in main for name in ("create_model", "from_pretrained"))
    assert "<code>from coder_plugin.integrations.transformers import CoderTrainer</code>" in main
    assert "<code>from coder_plugin.losses.base import Term</code>" in plugins


def test_the_api_pages_hold_the_docstrings(site: Path) -> None:
    from coder_plugin import __all__ as names
    from coder_plugin import functional

    main, functions = article(site, Path("api/main.md")), article(site, Path("api/functional.md"))
    assert all(f">{name}" in main for name in names if name != "__version__")
    assert all(f'id="coder_plugin.functional.{name}"' in functions for name in functional.__all__)
    assert functions.count("Examples:") >= 10 and "&gt;&gt;&gt;" in functions
    for page in (path for path in PAGES if path.parts[0] == "api"):
        html = article(site, page)
        assert not re.search(r":(func|class|meth|mod):", html), page
        assert "<blockquote>" not in html, page
        assert "docs/" not in re.sub(r"<[^>]+>", "", html), page


@pytest.mark.parametrize("page", [page for page in PAGES if page.parts[0] != "api"], ids=str)
def test_lists_tables_and_code_are_rendered(site: Path, page: Path) -> None:
    """GitHub begins a list or a table after any line; Python-Markdown wants an empty one, and four spaces inside lists."""
    text, html = (ROOT / "docs" / page).read_text(encoding="utf-8"), article(site, page)
    outside = prose(ROOT / "docs" / page)
    assert html.count("<li>") == len(re.findall(r"^ *(?:[-*]|\d+\.) ", outside, flags=re.M))
    assert html.count("<tr>") == len(re.findall(r"^\|(?! ?-{2,})", outside, flags=re.M))
    assert html.count("<pre>") == len(re.findall(r"^```", text, flags=re.M)) / 2
    assert "```" not in html


def test_every_page_says_what_it_is_for() -> None:
    """One title, then a sentence, before anything else."""
    for page in PAGES:
        lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
        assert re.match(r"# \S", lines[0]) and lines[1] == "", page
        assert re.match(r"[A-Z`*]", lines[2]), f"{page}: {lines[2]}"
