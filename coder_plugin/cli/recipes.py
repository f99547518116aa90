"""``coder-plugin recipes``: list objectives and recipes, or print one as TOML."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from coder_plugin.cli.flags import add_command
from coder_plugin.config import option
from coder_plugin.terminal import echo


@dataclass(frozen=True, kw_only=True)
class Command:
    """The flags of ``coder-plugin recipes``."""

    name: str | None = option(None, "a name from the list, or a .toml file", metavar="NAME", positional=True)
    all: bool = option(False, "also list the rows of the papers' tables and figures")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "recipes",
        help="list objectives (for --loss) and recipes (for --recipe), or print one",
        description="Without NAME, list the named objectives, which --loss takes, and the recipes, which --recipe takes, by "
        "paper. With NAME, print it as TOML: a file to start your own from, for --recipe FILE.toml.",
    )
    add_command(parser, Command, run)


def run(command: Command) -> int:
    echo(list_recipes(tables=command.all) if command.name is None else print_recipe(command.name))
    return 0


def list_recipes(*, tables: bool = False) -> str:
    """Rows of kind, name and description, grouped by paper; those of other packages come last.

    Args:
        tables: also the recipes of single rows of the papers' tables and figures, whose names hold a slash.
    """
    from coder_plugin import recipes, registry

    names = [name for name in (*recipes.names(), *recipes.objectives()) if tables or "/" not in name]
    width = max(map(len, names))
    blocks, hidden = [], 0
    for file in recipes.files():
        rows = [("objective", name, table) for name, table in file.objectives.items()]
        rows += [("recipe", name, table) for name, table in file.recipes.items() if tables or "/" not in name]
        hidden += len(file.recipes) + len(file.objectives) - len(rows)
        lines = [f"  {kind:<9}  {name:<{width}}  {table.get('description', '')}" for kind, name, table in rows]
        blocks.append("\n".join([file.paper, *lines]))
    plugins = registry.list_plugins("recipes")
    if plugins:
        lines = [f"  {'':<9}  {p.name:<{width}}  {p.distribution} {p.version}".rstrip() for p in plugins]
        blocks.append("\n".join(["Other packages", *lines]))
    if hidden:
        blocks.append(f"{hidden} more recipes, one for each row of the papers' tables and figures: coder-plugin recipes --all")
    return "\n\n".join(blocks)


def print_recipe(name: str) -> str:
    """A recipe as TOML with everything that it inherits, the objective of that name before it, if there is one.

    Comments after it hold the objectives that its loss names, and those that they name, with their options.
    """
    from coder_plugin import recipes
    from coder_plugin.expression import Expression

    objective = None if name.endswith(".toml") else recipes.find_objective(name)
    shown = [] if objective is None else [objective]
    if objective is None or recipes.has_recipe(name):
        shown.append(recipes.load(name))
    tables = [each.to_toml() for each in shown]
    for each in shown:  # which grows
        for item in Expression.parse(each.loss).items:
            if (named := recipes.find_objective(item.name)) is not None and named not in shown:
                shown.append(named)
                tables.append("\n".join(f"# {line}".rstrip() for line in named.to_toml().splitlines()))
    return "\n\n".join(tables)
