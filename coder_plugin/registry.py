"""Entry-point registries: how losses, heads, readers … are found by name, ours and other people's alike.

Discovery reads package metadata only, so listing every plugin costs milliseconds and imports none of them (nor torch).
A plugin is imported when it is asked for by name, and what is wrong with one name – two packages claim it, its import
fails – is an error for whoever asks for that name and for nobody else.
"""

from __future__ import annotations

import difflib
import importlib
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any

from coder_plugin.errors import CoderError

PREFIX = "coder_plugin."
GROUPS = ("losses", "heads", "negatives", "positives", "backbones", "detectors", "readers", "regions", "recipes")

_cache: dict[str, tuple[Plugin, ...]] = {}


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What metadata says about one entry point; `error` is why it cannot be loaded, as far as that is known."""

    group: str
    name: str
    distribution: str
    version: str
    target: str
    error: str | None = None


def list_plugins(group: str | None = None, *, check: bool = False) -> list[Plugin]:
    """Every plugin known, or those of one group, none imported; a name claimed twice appears twice, with `error`.

    `check=True` also imports each of them and records failures in `error` instead of raising: one run shows all faults.
    """
    groups = GROUPS if group is None else (_short(group),)
    found = [plugin for each in groups for plugin in _discover(each)]
    return [_checked(plugin) for plugin in found] if check else found


def names(group: str) -> list[str]:
    """The names known in a group, sorted; whether they load is not looked at."""
    return sorted({plugin.name for plugin in _discover(_short(group))})


def load(group: str, name: str) -> Any:
    """The object behind a name, importing only the module that holds it."""
    group = _short(group)
    claims = [plugin for plugin in _discover(group) if plugin.name == name]
    if not claims:
        raise _unknown(f"name in {PREFIX}{group}", name, names(group))
    if len(claims) > 1:
        raise CoderError(f"{name!r} in {PREFIX}{group} is {claims[0].error}")
    return _resolve(claims[0])


def refresh() -> None:
    """Forget what was discovered; needed only where packages are installed, or `sys.path` changes, while we run."""
    _cache.clear()
    importlib.invalidate_caches()


def format_plugins(plugins: Iterable[Plugin]) -> str:
    """An aligned plain-text table; errors come last, unpadded, so that a long one widens no other row."""
    rows = [
        (p.group, p.name, f"{p.distribution} {p.version}", p.target, f"error: {_one_line(p.error)}" if p.error else "")
        for p in plugins
    ]
    if not rows:
        return "no plugins found"
    table = [("group", "name", "distribution", "target", ""), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in table)


def _short(group: str) -> str:
    """Groups may be written as in `pyproject.toml` ("coder_plugin.losses") or without the prefix."""
    short = group.removeprefix(PREFIX)
    if short not in GROUPS:
        raise _unknown("plugin group", short, GROUPS)
    return short


def _discover(group: str) -> tuple[Plugin, ...]:
    if group in _cache:
        return _cache[group]
    # A distribution may be met twice (an egg-info beside a dist-info, an editable install on two path entries). The
    # standard library compares file names and misses some of these; here the name inside the metadata decides. The
    # first one on the path stays, as with `import`.
    found: dict[tuple[str, str], Plugin] = {}
    for point in _entry_points(PREFIX + group):
        distribution, version = _identity(point.dist)
        key = point.name, re.sub(r"[-_.]+", "-", distribution).lower()  # PEP 503
        plugin = Plugin(group=group, name=point.name, distribution=distribution, version=version, target=point.value)
        found.setdefault(key, plugin)
    claims: dict[str, list[Plugin]] = {}
    for _, plugin in sorted(found.items()):
        claims.setdefault(plugin.name, []).append(plugin)
    _cache[group] = tuple(plugin for rivals in claims.values() for plugin in _with_conflict(rivals))
    return _cache[group]


def _entry_points(group: str) -> list[EntryPoint]:
    """`entry_points(group=…)`, which gives up altogether when any installed package, related or not, has a bad file."""
    try:
        return list(entry_points(group=group))
    except Exception:
        pass  # find the package at fault, report it, and keep the others
    points: list[EntryPoint] = []
    for distribution in distributions():
        try:
            points += [point for point in distribution.entry_points if point.group == group]
        except Exception as exc:
            who = " ".join(_identity(distribution))
            warnings.warn(f"plugins of {who} are ignored: unreadable entry points: {_cause(exc)}", stacklevel=2)
    return points


def _identity(distribution: Distribution | None) -> tuple[str, str]:
    """Name and version. A half-removed package has neither, and then its place is the only thing to call it by."""
    if distribution is None:
        return "an unknown package", "?"
    try:
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    except Exception:  # newer Pythons raise where older ones answer None
        name = version = ""
    return name or f"a package without metadata in {distribution.locate_file('')}", version or "?"


def _with_conflict(rivals: list[Plugin]) -> list[Plugin]:
    """Equal targets conflict as well: the packages may be upgraded apart, and nobody could say which one answers."""
    if len(rivals) == 1:
        return rivals
    who = " and ".join(f"{plugin.distribution} {plugin.version} ({plugin.target})" for plugin in rivals)
    error = f"claimed by {len(rivals)} distributions: {who}; uninstall all but one"
    return [replace(plugin, error=error) for plugin in rivals]


def _checked(plugin: Plugin) -> Plugin:
    if plugin.error is None:
        try:
            _resolve(plugin)
        except CoderError as exc:
            return replace(plugin, error=_cause(exc.__cause__))
    return plugin


def _resolve(plugin: Plugin) -> Any:
    point = EntryPoint(name=plugin.name, value=plugin.target, group=PREFIX + plugin.group)
    try:
        return point.load()
    # Third-party code runs here and may raise anything; one that calls sys.exit() must not end the command either.
    except (Exception, SystemExit) as exc:
        raise CoderError(
            f"{plugin.name!r} in {PREFIX}{plugin.group}, from {plugin.distribution} {plugin.version}, "
            f"cannot be loaded from {plugin.target}: {_cause(exc)}"
        ) from exc


def _unknown(what: str, given: str, known: Sequence[str]) -> CoderError:
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(given.lower(), by_lower, n=1)
    hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ";"
    return CoderError(f"unknown {what}: {given!r}{hint} known: {', '.join(known) or 'none'}")


def _cause(exc: BaseException | None) -> str:
    return _one_line(f"{type(exc).__name__}: {exc}")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
