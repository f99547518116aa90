"""Plugins by name: losses, heads, readers and more, from entry points and from :func:`register`.

Discovery reads only package metadata, so listing all plugins takes milliseconds and imports none of them. A plugin is
imported when it is used. A fault of one name (two packages claim it, its import fails) is an error only where that name
is used. A loss may also be a class in a file, ``PATH.py:NAME``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any

from coder_plugin.errors import CoderError, did_you_mean

PREFIX = "coder_plugin."
GROUPS = (
    *("losses", "heads", "negatives", "positives", "backbones", "detectors", "readers", "regions", "recipes"),
    *("rerankers", "loss_libraries"),
)

#: The distribution of plugins that were registered in this process, not by an entry point.
REGISTERED = "register()"

_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)", re.DOTALL)
_cache: dict[str, tuple[Plugin, ...]] = {}
_registered: dict[tuple[str, str], Any] = {}


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What is known of a plugin without importing it.

    Args:
        target: where it is, ``module:attribute``.
        error: why it cannot be used, if that is known.
    """

    group: str
    name: str
    distribution: str
    version: str
    target: str
    error: str | None = None


def list_plugins(group: str | None = None, *, check: bool = False) -> list[Plugin]:
    """All plugins, or those of one group, without importing them.

    Args:
        group: one of ``losses``, ``heads``, ``negatives``, ``positives``, ``backbones``, ``detectors``, ``readers``,
            ``regions``, ``recipes``, ``rerankers`` and ``loss_libraries``.
        check: also import each plugin. Failures are recorded in ``error`` and not raised, so one call shows all faults.

    Returns:
        The plugins, by group and name. A name with two claims is there twice, with ``error``.

    Raises:
        CoderError: an unknown group.

    Example:
        >>> [plugin.name for plugin in list_plugins("positives")]
        ['join', 'truncate']
    """
    groups = GROUPS if group is None else (_short(group),)
    plugins = [plugin for each in groups for plugin in _discover(each)]
    return [_checked(plugin) for plugin in plugins] if check else plugins


def register(group: str, name: str, target: Any = None) -> Any:
    """Give a plugin a name in this process, as an entry point does for an installed package.

    Args:
        group: one of the groups of :func:`list_plugins`.
        name: its name in loss expressions and flags.
        target: a class, a function, or where to import it from, ``"module:attribute"``. Without it, a decorator.

    Returns:
        The target, or the decorator. Registering the same target again does nothing; a class or function that was defined
        anew under its old name, as when a notebook's cell is run again, replaces the old one.

    Raises:
        CoderError: an unknown group, or the name has another target; names both.

    Example:
        >>> import torch
        >>> from coder_plugin import create_loss, create_model, register
        >>> @register("losses", "pull")
        ... class Pull(torch.nn.Module):
        ...     requires = ("image_features", "text_features")
        ...
        ...     def forward(self, image_features, text_features):
        ...         return (1 - (image_features * text_features).sum(1)).mean()
        >>> model = create_model("coder-tiny", loss="clip + 0.5*pull")
        >>> list(create_loss("clip + 0.5*pull", model=model).terms)
        ['clip', 'pull']
    """
    group = _short(group)
    if target is None:
        return lambda target: register(group, name, target)
    if not re.fullmatch(r"[A-Za-z_]\w*(?:[./-]\w+)*", name):
        raise CoderError(
            f"register: {name!r} is not a name of a plugin: use letters, digits and underscores, with single dots, dashes "
            "or slashes between them"
        )
    path = _path(target)
    rival = next((plugin for plugin in _discover(group) if plugin.name == name), None)
    if rival is not None and rival.target != path:
        who = f"{rival.distribution} {rival.version}".strip()
        raise CoderError(
            f"register: {name!r} in {PREFIX}{group} is already {rival.target} (from {who}), so it cannot be {path}: choose "
            "another name"
        )
    if rival is None or rival.distribution == REGISTERED:
        _registered[group, name] = target
        _cache.pop(group, None)
    return target


def unregister(group: str, name: str) -> None:
    """Undo :func:`register`. Does nothing where the name was not registered."""
    _registered.pop((_short(group), name), None)
    _cache.pop(_short(group), None)


def names(group: str) -> list[str]:
    """The names of a group, sorted. Whether they can be imported is not checked."""
    return sorted({plugin.name for plugin in _discover(_short(group))})


def class_in_file(name: str) -> str | None:
    """NAME of ``PATH.py:NAME``; None for a name of another form.

    Example:
        >>> class_in_file("./losses/mine.py:HubPenalty"), class_in_file("dcl")
        ('HubPenalty', None)
    """
    match = _FILE.fullmatch(name)
    return match and match[2]


def is_loss(name: str) -> bool:
    """Whether a name is that of a loss, ``PATH.py:NAME``, or a library of losses with a dot and more. Whether the file or
    the library has it is not checked."""
    return class_in_file(name) is not None or name in names("losses") or _library(name) is not None


def load(group: str, name: str) -> Any:
    """The object behind a name. Imports only the module that holds it.

    Raises:
        CoderError: an unknown name, one with two claims, or one whose import fails.
    """
    group = _short(group)
    if group == "losses" and (match := _FILE.fullmatch(name)):
        return _load_from_file(*match.groups())
    claims = [plugin for plugin in _discover(group) if plugin.name == name]
    if not claims and group == "losses" and (library := _library(name)):
        return load("loss_libraries", library)(name.removeprefix(f"{library}."))
    if not claims:
        raise _unknown(f"name in {PREFIX}{group}", name, names(group))
    if len(claims) > 1:
        raise CoderError(f"{name!r} in {PREFIX}{group} is {claims[0].error}")
    return _resolve(claims[0])


def refresh() -> None:
    """Forget what was discovered: needed only where packages are installed, or ``sys.path`` changes, in a running process."""
    _cache.clear()
    importlib.invalidate_caches()


def format_plugins(plugins: Iterable[Plugin]) -> str:
    """An aligned plain-text table. Errors come last and unpadded, so that a long one widens no other row."""
    rows = [
        (p.group, p.name, f"{p.distribution} {p.version}".strip(), p.target, f"error: {_one_line(p.error)}" if p.error else "")
        for p in plugins
    ]
    if not rows:
        return "no plugins found"
    table = [("group", "name", "distribution", "target", ""), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in table)


def format_names(plugins: Iterable[Plugin]) -> str:
    """The names of plugins, a line for each group. The package of a plugin that is not ours is named."""
    groups: dict[str, list[str]] = {}
    for plugin in plugins:
        package = f"{plugin.distribution} {plugin.version}".strip()
        origin = "" if plugin.distribution == "coder-plugin" else f" ({package})"
        note = " [cannot be used: --all]" if plugin.error else ""
        groups.setdefault(plugin.group, []).append(f"{plugin.name}{origin}{note}")
    width = max(map(len, groups), default=0)
    return "\n".join(f"{group:<{width}}  {', '.join(names)}" for group, names in groups.items()) or "no plugins found"


def _library(name: str) -> str | None:
    """The library of losses that ``LIBRARY.NAME`` belongs to: in ``loss_libraries``, a function from NAME to its term."""
    library, dot, _ = name.partition(".")
    return library if dot and library in names("loss_libraries") else None


def _short(group: str) -> str:
    """Groups may be written as in `pyproject.toml` ("coder_plugin.losses") or without the prefix."""
    short = group.removeprefix(PREFIX)
    if short not in GROUPS:
        raise _unknown("plugin group", short, GROUPS)
    return short


def _discover(group: str) -> tuple[Plugin, ...]:
    if group in _cache:
        return _cache[group]
    # A distribution may appear twice (an egg-info beside a dist-info, an editable install on two path entries). The
    # standard library compares file names and misses some of these; here the name inside the metadata decides. The
    # first one on the path wins, as with `import`.
    plugins: dict[tuple[str, str], Plugin] = {}
    for point in _entry_points(PREFIX + group):
        distribution, version = _identity(point.dist)
        key = point.name, re.sub(r"[-_.]+", "-", distribution).lower()  # PEP 503
        plugin = Plugin(group=group, name=point.name, distribution=distribution, version=version, target=point.value)
        plugins.setdefault(key, plugin)
    for (of_group, name), target in _registered.items():
        if of_group == group:
            plugin = Plugin(group=group, name=name, distribution=REGISTERED, version="", target=_path(target))
            plugins.setdefault((name, REGISTERED), plugin)
    claims: dict[str, list[Plugin]] = {}
    for _, plugin in sorted(plugins.items()):
        claims.setdefault(plugin.name, []).append(plugin)
    _cache[group] = tuple(plugin for rivals in claims.values() for plugin in _with_conflict(rivals))
    return _cache[group]


def _entry_points(group: str) -> list[EntryPoint]:
    """`entry_points(group=…)`, which fails when any installed package, related or not, has a bad file; then the others'."""
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
    """Name and version. A half-removed package has neither; then it is called by its path."""
    if distribution is None:
        return "an unknown package", "?"
    try:
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    except Exception:  # newer Pythons raise where older ones return None
        name = version = ""
    return name or f"a package without metadata in {distribution.locate_file('')}", version or "?"


def _with_conflict(rivals: list[Plugin]) -> list[Plugin]:
    """Equal targets conflict as well: the packages may be upgraded independently, and it would be unclear which one is used."""
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
    if plugin.distribution == REGISTERED:
        target = _registered[plugin.group, plugin.name]
        if not isinstance(target, str) or target.endswith(".toml"):
            return target
    point = EntryPoint(name=plugin.name, value=plugin.target, group=PREFIX + plugin.group)
    try:
        return point.load()
    # Third-party code runs here and may raise anything; one that calls sys.exit() must not end the command either.
    except (Exception, SystemExit) as exc:
        raise CoderError(
            f"{plugin.name!r} in {PREFIX}{plugin.group}, from {f'{plugin.distribution} {plugin.version}'.strip()}, "
            f"cannot be loaded from {plugin.target}: {_cause(exc)}"
        ) from exc


def _load_from_file(path: str, name: str) -> Any:
    """A class in a file, which is imported once in a process."""
    file = os.path.abspath(os.path.expanduser(path))
    module_name = f"_coder_plugin_file_{hashlib.sha256(file.encode()).hexdigest()[:16]}"
    if module_name not in sys.modules:
        if not os.path.isfile(file):
            raise CoderError(f"{path}: there is no file {file}")
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[module_name] = importlib.util.module_from_spec(spec)  # by this name its classes can be pickled
        try:
            spec.loader.exec_module(sys.modules[module_name])
        except (Exception, SystemExit) as exc:  # as in _resolve
            del sys.modules[module_name]
            raise CoderError(f"{path} cannot be imported: {_cause(exc)}") from exc
    members = vars(sys.modules[module_name])
    if not isinstance(members.get(name), type):
        own = [each for each in members.values() if isinstance(each, type) and each.__module__ == module_name]
        losses = sorted(each.__name__ for each in own if hasattr(each, "requires") and not hasattr(each, "provides"))
        hint = did_you_mean(name, losses) or ";"
        raise CoderError(f"{path} has no class {name!r}{hint} its losses: {', '.join(losses) or 'none'}")
    return members[name]


def _path(target: Any) -> str:
    """``module:attribute`` of a target; of a value without a name, such as a recipe's fields, its text."""
    if isinstance(target, str):
        return target
    if not hasattr(target, "__qualname__"):
        return repr(target)
    return f"{target.__module__}:{target.__qualname__}"


def _unknown(what: str, name: str, known: Sequence[str]) -> CoderError:
    return CoderError(f"unknown {what}: {name!r}{did_you_mean(name, known) or ';'} known: {', '.join(known) or 'none'}")


def _cause(exc: BaseException | None) -> str:
    return _one_line(f"{type(exc).__name__}: {exc}")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
