"""Hooks of mkdocs.yml: pages from the repository's top folder, and what docstrings look like on the site."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import relpath
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

import coder_plugin

#: Pages of the repository's top folder that the site has, too.
TOP_PAGES = ("SECURITY.md", "CHANGELOG.md")


def on_config(config: Any) -> Any:
    """Show the version beside the name."""
    config["site_name"] += f" {coder_plugin.__version__}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the top folder, whose links into ``docs/`` lose that prefix."""
    top = Path(config["config_file_path"]).parent
    for name in TOP_PAGES:
        text = (top / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to pages of the top folder, ``../NAME``, find them in the site."""
    return re.sub(rf"\]\(\.\./({'|'.join(map(re.escape, TOP_PAGES))})", r"](\1", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Docstrings refer to names as Sphinx does and to pages by their path; show the name, and link the page.

    Each documented name has its import below its heading.
    """
    html = re.sub(
        r'<h2 id="(?:coder_plugin\.)?([\w.]*?)\.?(\w+)" class="doc doc-heading">.*?</h2>',
        lambda found: f"{found[0]}<p class='doc-import'><code>{_import(found[1], found[2])}</code></p>",
        html,
        flags=re.S,
    )
    html = re.sub(r":(?:func|class|meth|mod|attr):<code>~?(?:[\w.]*\.)?(\w+)</code>", r"<code>\1</code>", html)
    here = page.file.dest_uri.rpartition("/")[0] or "."
    return re.sub(
        r"(?<![\w/\"])docs/(\w+)\.md(#[\w-]+)?",
        lambda match: f'<a href="{relpath(match[1] + ".html", here)}{match[2] or ""}">{match[1]}.md{match[2] or ""}</a>',
        html,
    )


def _import(module: str, name: str) -> str:
    """The line that imports a name: from the package itself where that has it."""
    where = "coder_plugin" if not module or name in coder_plugin.__all__ else f"coder_plugin.{module}"
    return f"from {where} import {name}"


class Docstrings(griffe.Extension):
    """Docstrings call doctests ``Example:``, griffe ``Examples:``; a bound such as ``n: >= 1`` is not a quotation."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Show the default of an option, without its help text."""
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == "option":
            attr.value = attr.value.arguments[0]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r"^( +[\w, ]+: )>", r"\1\\>", text, flags=re.M)
