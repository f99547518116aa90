"""The Python that README and docs show runs as printed; links and files that they name exist."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
from pathlib import Path

import pytest

from coder_plugin import registry
from coder_plugin.backbones.base import OUTPUT_KEYS
from coder_plugin.resolver import OWN_DISTRIBUTION
from tests import fresh
from tests.documentation import PAGES, ROOT, blocks, prose


def python(page: Path) -> str:
    """The page's Python as one program."""
    return "\n\n".join(block.text for block in blocks(page, "python"))


#: Pages that tests of what they are about run, blocks included that need more than is here.
ELSEWHERE = ("frameworks.md", "sentence_transformers.md")


#: Pages whose blocks run by default.
FIRST = ("README.md", "ascl.md", "plugins.md")


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_python_blocks_run(tmp_path: Path, first: bool) -> None:
    """In one process that forks for each page: the imports, which take seconds, are made once."""
    pages = [page for page in PAGES if any(block.reason is None for block in blocks(page, "python"))]
    pages = [page for page in pages if page.name not in ELSEWHERE and (page.name in FIRST) == first]
    assert len(pages) == len(FIRST) if first else len(pages) > 6
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
    }
    arguments = ["-m", "tests.run_documentation", str(tmp_path), *map(str, pages)]
    done = fresh.run(arguments, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    failures = json.loads(done.stdout.splitlines()[-1])
    assert not failures, "\n".join(f"{page}:\n{output[-2000:]}" for page, output in failures.items())


def test_few_blocks_are_not_run() -> None:
    """Each with its reason in the page; a new one is a decision."""
    skipped = [block.name for page in PAGES for block in blocks(page, "python") if block.reason]
    pages = ["finetune_clip"] + ["frameworks"] * 3 + ["paper_and_code"]
    assert [Path(name.partition(":")[0]).stem for name in skipped] == pages, skipped


def test_python_blocks_name_what_exists() -> None:
    for page, node in ((each, node) for each in PAGES for node in ast.walk(ast.parse(python(each)))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("coder_plugin"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{page.name}: {node.module} has no {alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "coder_plugin":
            assert hasattr(importlib.import_module("coder_plugin"), node.attr), f"{page.name}: coder_plugin has no {node.attr}"


def test_code_in_a_sentence_fits_its_column() -> None:
    """It does not wrap on a wide screen: what is longer than about 100 characters needs a block."""
    codes = [code for page in PAGES for code in re.findall(r"`([^`]+)`", prose(page))]
    assert len(codes) > 1000
    assert not [code for code in codes if len(code) > 100]


#: A path in code quotes, such as `losses/dcl.py`, in the pages that map the repository.
PATH = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_0-9]+\.(?:py|toml))?)`")


def test_paths_in_the_map_exist() -> None:
    paths = [path for page in ("architecture", "equations") for path in PATH.findall((ROOT / f"docs/{page}.md").read_text())]
    assert len(paths) > 40
    missing = [path for path in paths if not any((home / path).exists() for home in (ROOT, ROOT / "coder_plugin"))]
    assert missing == []


def test_the_table_of_keys_is_complete() -> None:
    """Each key of the model and of our heads, with the head that provides it, or in the docstring of a head that is named."""
    text = (ROOT / "docs" / "plugins.md").read_text().partition("### Keys that a loss may require")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    listed = sorted((key, head.strip("`")) for keys, _, _, head in rows for key in re.findall(r"`(\w+)`", keys))
    documented = re.findall(r"`(\w+)`", text.partition("AsCL's heads")[2].partition("provide further keys")[0])
    ours = [head.name for head in registry.list_plugins("heads") if head.distribution == OWN_DISTRIBUTION]
    heads = {name: registry.load("heads", name) for name in ours}
    provided = [(key, name) for name in ours if name not in documented for key in heads[name].provides]
    assert listed == sorted([*((key, "the model") for key in OUTPUT_KEYS | {"logit_bias"}), *provided])
    assert len(documented) == 4
    assert [key for name in documented for key in heads[name].provides if f"``{key}``" not in heads[name].__doc__] == []


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_somewhere() -> None:
    for page, target in ((each, target) for each in PAGES for target in re.findall(r"\]\(([^)\s]+)\)", each.read_text())):
        if re.match(r"\w+:", target):
            continue
        file, _, fragment = target.partition("#")
        path = (page.parent / file) if file else page
        assert path.exists(), f"{page.name}: {target}"
        if fragment and path.suffix == ".md":
            headings = re.findall(r"^#+ +(.*)$", path.read_text(), flags=re.M)
            named = re.findall(r'<a id="([^"]+)">', path.read_text())
            assert fragment in {*named, *(anchor(heading) for heading in headings)}, f"{page.name}: {target}"


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
