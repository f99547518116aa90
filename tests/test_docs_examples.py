"""The Python that README and docs show runs as printed; links and files that they name exist."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> str:
    """All ```python blocks of a page, one after the other, as one program."""
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S))


#: Pages whose Python needs nothing but the package. The others show how a trained model or a download is used.
SELF_CONTAINED = [ROOT / name for name in ("README.md", "docs/plugins.md", "docs/training.md")]


@pytest.mark.parametrize("page", SELF_CONTAINED, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    assert blocks(page)
    script = tmp_path / "blocks.py"
    script.write_text(blocks(page))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_python_blocks_name_what_exists(page: Path) -> None:
    for node in ast.walk(ast.parse(blocks(page))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("coder_plugin"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "coder_plugin":
            assert hasattr(importlib.import_module("coder_plugin"), node.attr), f"coder_plugin has no {node.attr}"


#: A path in code quotes, such as `losses/dcl.py`, in the page that maps the repository.
PATH = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_0-9]+\.(?:py|toml))?)`")


def test_paths_in_the_map_exist() -> None:
    paths = PATH.findall((ROOT / "docs" / "architecture.md").read_text())
    assert len(paths) > 30
    missing = [path for path in paths if not any((home / path).exists() for home in (ROOT, ROOT / "coder_plugin"))]
    assert missing == []


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        file, _, fragment = target.partition("#")
        path = (page.parent / file) if file else page
        assert path.exists(), target
        if fragment and path.suffix == ".md":
            headings = re.findall(r"^#+ +(.*)$", path.read_text(), flags=re.M)
            named = re.findall(r'<a id="([^"]+)">', path.read_text())
            assert fragment in {*named, *(anchor(heading) for heading in headings)}, target


#: Notes outside the repository and words that a reader of the field cannot know.
FORBIDDEN = re.compile(r"\bMETHODS\b|\bDESIGN\b|\bSTYLE\.md\b")


def test_nothing_cites_what_is_not_in_the_repository() -> None:
    folders = ("coder_plugin", "integrations", "docs", "scripts", "tests")
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    files = [ROOT / "README.md", *(path for path in inside if path.suffix in (".py", ".md", ".toml"))]
    cited = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert cited == []
