"""Every public function and class says what goes in, what comes out and what it refuses, with an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest

import coder_plugin
from coder_plugin import registry
from tests.test_api_surface import PROMISED

#: Public names that take nothing a caller chooses, or are values.
NOT_CALLABLE = {"__version__"}


def public() -> Iterator[tuple[str, object]]:
    """The names promised to users, everything ``coder_plugin`` exports, and every loss term and head of ours."""
    for name in coder_plugin.__all__:
        if name not in NOT_CALLABLE:
            yield f"coder_plugin.{name}", getattr(coder_plugin, name)
    for module, signatures in PROMISED.items():
        if module != "coder_plugin":
            for signature in signatures:
                name = signature.partition("(")[0]
                yield f"{module}.{name}", getattr(importlib.import_module(module), name)
    for group in ("losses", "heads"):
        for plugin in registry.list_plugins(group):
            if plugin.distribution == "coder-plugin":
                yield f"{group}:{plugin.name}", registry.load(group, plugin.name)


PUBLIC = dict(public())


#: Every head's first argument, which :class:`coder_plugin.heads.base.Head` documents once.
SHARED = {"backbone"}


def parameters_to_document(value: object) -> list[str]:
    parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.name not in SHARED]


def documentation(value: object) -> str:
    """The docstring, with those of the functions of ``functional`` that it refers to: a term takes its function's options."""
    text = inspect.getdoc(value) or ""
    functional = importlib.import_module("coder_plugin.functional")
    referred = re.findall(r":func:`coder_plugin\.functional\.(\w+)`", text)
    seen = set(referred)
    for name in referred:
        inner = inspect.getdoc(getattr(functional, name)) or ""
        text += inner
        new = [each for each in re.findall(r":func:`(\w+)`", inner) if each not in seen and hasattr(functional, each)]
        seen.update(new)
        referred += new
    return text


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_names_every_parameter(name: str) -> None:
    value = PUBLIC[name]
    text = documentation(value)
    assert text, "no docstring"
    if isinstance(value, type) and issubclass(value, BaseException):
        return
    missing = [each for each in parameters_to_document(value) if not re.search(rf"\b{re.escape(each)}\b", text)]
    assert not missing, f"the docstring does not mention {', '.join(missing)}"


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.split(".")[-1][0].islower() and ":" not in name])
def test_functions_say_what_they_return_and_raise(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    nothing = inspect.signature(PUBLIC[name]).return_annotation in (None, "None")  # type: ignore[arg-type]
    assert "Returns:" in text or nothing
    assert "Raises:" in text


@pytest.mark.parametrize("name", PUBLIC)
def test_example_runs(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = PUBLIC[name]
    if isinstance(value, type) and issubclass(value, BaseException):
        pytest.skip("an exception needs no example")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(value.__module__)  # type: ignore[attr-defined]
    tests = doctest.DocTestFinder(recurse=False).find(value, name, module=module, globs=dict(vars(module)))
    examples = sum(len(test.examples) for test in tests)
    assert examples, "no example (>>>) in the docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        report: list[str] = []
        failed, _ = runner.run(test, out=report.append)
        assert not failed, "".join(report)
