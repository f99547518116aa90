"""``coder-plugin plugins``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from coder_plugin.cli.flags import add_command
from coder_plugin.config import option
from coder_plugin.terminal import echo


@dataclass(frozen=True, kw_only=True)
class Command:
    """The flags of ``coder-plugin plugins``."""

    group: str | None = option(
        None, "one group, with the origin of each: losses, heads, readers, recipes …", positional=True, metavar="GROUP"
    )
    all: bool = option(False, "a row for each, with its package and where it is loaded from")
    check: bool = option(False, "import each one and report failures")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "plugins",
        help="list losses, heads, readers, recipes … and where they come from",
        description="List what can be named: losses, heads, readers, recipes …, of this package and of others.",
    )
    add_command(parser, Command, run)


def run(arguments: Command) -> int:
    from coder_plugin.cli.recipes import list_recipes
    from coder_plugin.registry import format_names, format_plugins, list_plugins

    plugins = list_plugins(arguments.group, check=arguments.check)
    if arguments.group == "recipes":
        echo(list_recipes(tables=arguments.all))
    elif arguments.group or arguments.all or arguments.check:
        echo(format_plugins(plugins))
        if arguments.all:
            echo(f"\n{list_recipes(tables=True)}")
    else:
        echo(format_names(plugin for plugin in plugins if plugin.group != "recipes"))
        echo(f"\n{list_recipes()}\n\nmore: coder-plugin plugins GROUP, or --all")
    return 1 if any(plugin.error for plugin in plugins) else 0
