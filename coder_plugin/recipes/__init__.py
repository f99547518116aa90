"""Named objectives and recipes, as data: the TOML files in this folder, and those of other packages.

An *objective* is what is minimised: a loss expression and options of its terms and heads. A *recipe* is a whole set-up: a
loss, and settings of model, data and training. A file holds tables of both::

    [objectives.mine]
    description = "DCL with a small mu"
    loss = "3*dcl + clip"
    options = { dcl.mu = 0.05 }

    [recipes.mine-f30k]
    description = "The same on Flickr30K"
    base = "coder-f30k"          # inherit everything that is not set here
    loss = "mine"                # a new loss starts without the base's options
    batch_size = 64              # every setting has the name of its flag

Other packages add theirs through the entry-point group ``coder_plugin.recipes`` or :func:`coder_plugin.register`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from coder_plugin import registry
from coder_plugin.config import SUBJECTS, flatten, get_option, options_by_name
from coder_plugin.errors import CoderError, did_you_mean
from coder_plugin.files import read_options
from coder_plugin.locations import local_only

#: The fields of each kind of table; a recipe's other fields are settings.
_FIELDS = {"objectives": ("description", "loss", "options"), "recipes": ("description", "base", "loss", "options")}


@dataclass(frozen=True)
class Recipe:
    """A whole set-up: what is minimised, and the settings of model, data and training; or a named objective, without settings.

    Args:
        loss: a loss expression or a named objective.
        options: options of its terms and heads by ``"OWNER.OPTION"``, such as ``{"prototypes.clusters": 10000}``.
        settings: values of flags by their names, such as ``{"lr": 2e-4, "model": "region-bert"}``.
        kind: the table that it is read from, ``recipes`` or ``objectives``.
    """

    name: str
    loss: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    kind: str = "recipes"

    def to_toml(self) -> str:
        """A table of a TOML file, with everything that a recipe inherits."""
        fields = {"description": self.description, "loss": self.loss, **self.settings}
        lines = [f"[{self.kind}.{_toml_key(self.name)}]", *(f"{key} = {_toml(value)}" for key, value in fields.items())]
        if self.options:
            lines += ["", f"[{self.kind}.{_toml_key(self.name)}.options]"]
            lines += [f"{'.'.join(map(_toml_key, key.split('.')))} = {_toml(value)}" for key, value in self.options.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class RecipeFile:
    """The tables of one file, checked but with nothing inherited yet."""

    origin: str
    paper: str = ""
    objectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def load(name: str | Path) -> Recipe:
    """A recipe by its name, or from a TOML file.

    Args:
        name: a name of :func:`names`, or the path of a ``.toml`` file, which holds one recipe: its fields, or one table
            ``[recipes.NAME]``.

    Raises:
        CoderError: an unknown name, a file that cannot be read, an unknown field, or recipes that inherit from each other in
            a circle.

    Example:
        >>> recipe = load("coder-f30k")
        >>> recipe.loss, recipe.options, recipe.settings["lr"]
        ('coder-paper', {'prototypes.clusters': 10000}, 0.0002)
    """
    if isinstance(name, Path) or name.endswith(".toml"):
        file = _read(Path(name), single=True)
        if len(file.recipes) != 1:
            tables = ", ".join(file.recipes) or "none"
            raise CoderError(f"{file.origin}: --recipe needs a file with one recipe; it holds: {tables}")
        (only,) = file.recipes
        return _build(only, file, ())
    return _load(str(name), ())


def find_objective(name: str) -> Recipe | None:
    """The named objective, or None where no objective has the name.

    Example:
        >>> find_objective("coder-clip").options["dcl.mu"]
        0.05
    """
    file = _file_of("objectives", name)
    if file is None:
        return None
    table = file.objectives[name]
    if "loss" not in table:
        raise CoderError(f"{file.origin}: [objectives.{name}] has no loss")
    loss = local_only({"loss": table["loss"]})["loss"]
    return Recipe(name, loss, table.get("options", {}), description=table.get("description", ""), kind="objectives")


def has_recipe(name: str) -> bool:
    """Whether a recipe has the name."""
    return _file_of("recipes", name) is not None


def names() -> list[str]:
    """The names of all recipes, sorted. Those of other packages are listed without loading them."""
    return sorted({*(name for file in files() for name in file.recipes), *registry.names("recipes")})


def objectives() -> list[str]:
    """The names of all objectives, sorted. Those of other packages are listed without loading them."""
    return sorted({*(name for file in files() for name in file.objectives), *registry.names("recipes")})


@cache
def files() -> tuple[RecipeFile, ...]:
    """The files of this package, in the order of their names."""
    return tuple(_read(path) for path in sorted(Path(__file__).parent.glob("*.toml")))


def _load(name: str, heirs: tuple[str, ...]) -> Recipe:
    file = _file_of("recipes", name)
    if file is not None:
        return _build(name, file, heirs)
    if find_objective(name) is not None:
        raise CoderError(f"{name!r} is an objective, not a recipe: it sets no model and no training; use --loss {name}")
    rows = [each for each in names() if each.rpartition("/")[2] == name]  # without its paper
    if not rows and name in registry.names("losses"):
        raise CoderError(f"{name!r} is a loss, not a recipe: it sets no model and no training; use --loss {name}")
    rows = rows or [each for each in names() if each.startswith(f"{name}-")]
    hint = f"; did you mean {rows[0]!r}?" if rows else did_you_mean(name, names(), objectives())
    raise CoderError(f"unknown recipe {name!r}{hint} (coder-plugin recipes --all lists them; a file's name ends in .toml)")


def _build(name: str, file: RecipeFile, heirs: tuple[str, ...]) -> Recipe:
    """A recipe with what it inherits; ``heirs`` are the recipes that inherit from it."""
    where = f"{file.origin}: [recipes.{name}]"
    if name in heirs:
        raise CoderError(f"{where}: recipes inherit from each other: {' -> '.join([*heirs, name])}")
    table = dict(file.recipes[name])
    base_name, description = table.pop("base", None), table.pop("description", "")
    loss, options = local_only({"loss": table.pop("loss", None)})["loss"], table.pop("options", {})
    settings = table
    if base_name is not None:
        if base_name in file.recipes and base_name != name:
            base = _build(base_name, file, (*heirs, name))
        elif has_recipe(base_name) and base_name != name or find_objective(base_name):
            base = _load(base_name, (*heirs, name))
        else:
            raise CoderError(f"{where}: base is an unknown recipe, {base_name!r}{did_you_mean(base_name, names())}")
        settings = {**base.settings, **settings}
        description = description or base.description
        if loss is None:
            loss, options = base.loss, {**base.options, **options}
    if loss is None:
        raise CoderError(f"{where} has neither a loss nor a base")
    return Recipe(name, loss, options, settings, description)


def _file_of(table: str, name: str) -> RecipeFile | None:
    """The file whose table ``objectives`` or ``recipes`` has the name: ours, or another package's."""
    ours = next((file for file in files() if name in file.objectives or name in file.recipes), None)
    plugin = next((plugin for plugin in registry.list_plugins("recipes") if plugin.name == name), None)
    if ours and plugin:
        raise CoderError(f"{name!r} is claimed by {ours.origin} and by {plugin.distribution} {plugin.version}: rename one")
    file = _file_of_plugin(name) if plugin else ours
    return file if file is not None and name in getattr(file, table) else None


def _file_of_plugin(name: str) -> RecipeFile:
    """What another package gives under a name: the fields of a recipe, a TOML file, or a callable that returns either."""
    target = registry.load("recipes", name)
    target = target() if callable(target) else target
    origin = f"{name!r} in {registry.PREFIX}recipes"
    if isinstance(target, Mapping):
        fields = set(target) - set(_FIELDS["objectives"])
        return _checked({"recipes" if fields else "objectives": {name: dict(target)}}, origin)
    if isinstance(target, Path) or (isinstance(target, str) and target.endswith(".toml")):
        file = _read(Path(target))
        if name not in file.objectives and name not in file.recipes:
            raise CoderError(f"{origin}: {target} holds neither [objectives.{name}] nor [recipes.{name}]")
        return file
    raise CoderError(
        f"{origin} is {target!r}; it must be a mapping such as {{'loss': '3*dcl'}}, the path of a .toml file, or a callable "
        "that returns either"
    )


def _read(path: Path, *, single: bool = False) -> RecipeFile:
    """Read a file; with ``single`` its top level may hold the fields of one recipe."""
    ours = path.parent == Path(__file__).parent
    origin = f"coder_plugin/recipes/{path.name}" if ours else str(path)
    data = read_options(path, origin)
    if single and not set(data) & {*_FIELDS, "paper"}:
        data = {"recipes": {path.stem: data}}
    if single and "objectives" in data:
        raise CoderError(f"{origin}: [objectives] are for packages; write the expression into the recipe's loss")
    return _checked(data, origin)


def _checked(data: Mapping[str, Any], origin: str) -> RecipeFile:
    for key in data:
        if key not in (*_FIELDS, "paper"):
            hint = did_you_mean(key, [*_FIELDS, "paper"])
            raise CoderError(f"{origin}: unknown table {key!r}{hint}; known: paper, [objectives.NAME], [recipes.NAME]")
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in _FIELDS:
        if not isinstance(data.get(kind, {}), Mapping):
            raise CoderError(f"{origin}: {kind} must hold tables, [{kind}.NAME]")
        tables[kind] = {name: _checked_table(kind, name, table, origin) for name, table in data.get(kind, {}).items()}
    return RecipeFile(origin, data.get("paper", ""), tables["objectives"], tables["recipes"])


def _checked_table(kind: str, name: str, table: Any, origin: str) -> dict[str, Any]:
    """The fields of an objective or a recipe. Settings have the names of their flags, or are grouped by subject,
    ``[recipes.NAME.optim]``."""
    where = f"{origin}: [{kind}.{name}]"
    if not isinstance(table, Mapping):
        raise CoderError(f"{where} must be a table")
    settings = [] if kind == "objectives" else [name for name in options_by_name() if name not in ("loss", "set", "recipe")]
    known = [*_FIELDS[kind], *settings]
    for key, value in table.items():
        if key == "set" and settings:
            raise CoderError(f"{where}: options of terms and heads belong into the table options, not into set")
        if key not in known and not (settings and key in SUBJECTS and isinstance(value, Mapping)):
            note = "" if settings else " (settings belong into a recipe)"
            raise CoderError(f"{where}: unknown field {key!r}{did_you_mean(key, known)}; known: {', '.join(known)}{note}")
        if key in ("description", "loss", "base") and not isinstance(value, str):
            raise CoderError(f"{where}: {key} must be text, got {value!r}")
        if key == "options" and not isinstance(value, Mapping):
            raise CoderError(f"{where}: options must be a table, such as {{ dcl.mu = 0.05 }}")
    fields = {key: value for key, value in table.items() if key in _FIELDS[kind]}
    if "options" in fields:
        fields["options"] = dict(_flat_options(fields["options"]))
        for owner in fields["options"]:
            if "." not in owner:
                raise CoderError(f"{where}: option {owner!r}: write OWNER.OPTION = VALUE, such as dcl.mu = 0.05")
    try:
        flat = flatten({key: value for key, value in table.items() if key not in fields})
        return fields | local_only({key: get_option(key).check(value, "recipe") for key, value in flat.items()})
    except CoderError as error:
        raise CoderError(f"{where}: {error}") from error


def _flat_options(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``{"dcl": {"mu": 0.05}}``, which ``dcl.mu = 0.05`` is in TOML, as ``"dcl.mu", 0.05``; "none" as None."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat_options(value, f"{prefix}{name}.")
        else:
            yield prefix + name, None if value == "none" else value


def _toml_key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if value is None:
        return '"none"'
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
