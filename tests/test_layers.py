"""No import goes up a layer and none goes in a circle, lazy imports inside functions included.

docs/architecture.md draws the same layers.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: From the bottom to the top. A module may import from its own layer and from those before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "files", "distributed", "launchers", "terminal", "hub_access"),
    ("registry", "expression", "options", "config", "html", "locations", "progress"),
    ("tensors", "masked"),
    ("contrast",),
    ("data",),
    ("backbones",),
    ("memory", "noise", "concepts", "detectors"),
    ("losses", "heads"),
    ("functional",),
    ("objective", "recipes"),
    ("resolver",),
    ("coder",),
    ("following",),
    ("model",),
    ("pretrained",),
    ("evaluation",),
    ("search",),
    ("serve",),
    ("training",),
    ("report", "doctor", "integrations"),
    ("compare",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, ``integrations`` included."""
    paths = {}
    for folder, package in (("coder_plugin", ("coder_plugin",)), ("integrations", ("coder_plugin", "integrations"))):
        for path in (ROOT / folder).rglob("*.py"):
            parts = (*package, *path.relative_to(ROOT / folder).with_suffix("").parts)
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = modules()


@functools.cache
def imports(path: Path) -> list[tuple[str, int]]:
    """The package's modules that a file imports, with line numbers; imports for type checkers alone do not count."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    ignored = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES else node.module), node.lineno


def layer(module: str) -> str | None:
    """The part of the package that a module belongs to; None for ``coder_plugin`` itself, which loads names lazily."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def test_every_part_has_a_layer() -> None:
    assert {layer(module) for module in MODULES} - {None} == set(LEVEL), "LAYERS must name exactly what exists"


def upward_imports() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {layer(module)} imports {imported}"
        for module, path in sorted(MODULES.items())
        for imported, line in imports(path)
        if layer(module) and layer(imported) and LEVEL[layer(imported)] > LEVEL[layer(module)]  # type: ignore[index]
    ]


def test_no_import_goes_up() -> None:
    assert upward_imports() == []


@pytest.mark.parametrize("grain", ["part", "module"])
def test_no_import_goes_in_a_circle(grain: str) -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for imported, _ in imports(path):
            ends = (layer(module), layer(imported)) if grain == "part" else (module, imported)
            if None not in ends and ends[0] != ends[1] and "coder_plugin" not in ends:
                graph.setdefault(ends[0], set()).add(ends[1])  # type: ignore[arg-type]
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])), pytrace=False)
